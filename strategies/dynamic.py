"""``compile=[regional,dynamic]``: symbolic shapes for ragged lengths, one graph for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage, Strategy

HOW = ("mark", "always", "automatic")


@dataclass(kw_only=True, slots=True)
class Dynamic(Strategy):
    """Leave batches as they are and let the compiled code take any length; ``buckets`` is the alternative.

    Batches keep examples and order; each one is only padded up to a ``multiple``, because attention kernels guard on
    alignment: without it, lengths of either kind need graphs of their own, or none can be compiled for all of them.
    """

    name: ClassVar[str] = "dynamic"
    stage: ClassVar[Stage] = Stage.SHAPES

    how: str = "mark"
    """``mark`` (the ragged dimensions symbolic from the start), ``always`` (every dimension: torch's ``dynamic=True``)
    or ``automatic`` (static at first, symbolic where a size changes: torch's ``dynamic=None``)."""
    multiple: int = 8
    """Every batch is padded up to a multiple of this many positions; 1 leaves lengths as they are."""
    limit: int | None = None
    """Most positions that the model takes; nothing is padded beyond it. null = no limit."""

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ValueError(f"compile.dynamic.how={self.how!r} is not one of {HOW}")
        for name in ("multiple", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"compile.dynamic.{name}={value} must be at least 1")

    def apply(self, program: Program) -> None:
        from strategies.padding import Marks, Padding, require_ragged

        require_ragged(program.ragged, self.name)
        program.padding = Padding(
            name=self.name, ragged=program.ragged, multiple=self.multiple, limit=self.limit, choose_edges=None
        )
        program.report[self.name] = {"how": self.how, "multiple": self.multiple}
        if self.how == "always":
            program.padding.dynamic = True
        elif self.how == "mark":
            marks = Marks(program.ragged)
            program.padding.observe = marks.observe
            program.padding.around_region = marks.around
