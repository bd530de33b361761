"""``compile=auto``: the run measures, then chooses among strategies the one that takes the least total time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from strategies.base import Stage, Strategy

CANDIDATES = ("regional", "whole", "cuda_graph")
"""Strategies that a choice may be made among; eager always is one, and cuda_graph joins any other."""


@dataclass(kw_only=True, slots=True)
class Auto(Strategy):
    """Choose how modules are compiled, and whether steps are captured, when the first batch is there.

    A few eager steps are timed; a candidate is compiled and timed as well where the steps to come could pay for that;
    what loses is undone. Inductor is imported for the first trial that compiles with it, which a short run never comes
    to. Everything happens before the first step and leaves no trace in the training. The decision,
    with its table, is in the record, and is remembered: a second run of the same program decides at once.
    ``trainer.auto`` does the work; other strategies (``buckets``, ``cached``, ``optimizer``) go with it as they are.
    """

    name: ClassVar[str] = "auto"
    stage: ClassVar[Stage] = Stage.MODULE
    chooser: ClassVar[str | None] = "trainer.auto.chooser:Chooser"
    training_only: ClassVar[str | None] = "chooses by the optimizer steps to come"

    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    """Strategies to choose among, of ``regional``, ``whole`` and ``cuda_graph``."""
    planned_steps: int | None = None
    """Optimizer steps that the choice is made for; null = those that this run has before it. Set it where this run
    is the first of several that go on from each other."""
    margin: float = 0.02
    """Share of the total time that a candidate must save: less is not worth a surprise."""
    remember: bool = True
    """Whether what an earlier run of the same program, batch, machine and torch measured is used, and this one kept."""
    memory: str | None = None
    """Directory of remembered decisions; null = ``crucible/auto`` in the user's cache directory."""

    def __post_init__(self) -> None:
        """Raise one ValueError with a line for each value that cannot be."""
        complaints = [
            f"compile.auto.candidates: {name!r} is not one of {CANDIDATES}"
            for name in self.candidates
            if name not in CANDIDATES
        ]
        if self.planned_steps is not None and self.planned_steps < 1:
            complaints.append(f"compile.auto.planned_steps={self.planned_steps} must be at least 1")
        if not 0 <= self.margin < 1:
            complaints.append(f"compile.auto.margin={self.margin} must be at least 0 and below 1")
        if complaints:
            raise ValueError("\n".join(complaints))
