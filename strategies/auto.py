"""``compile=auto``: the run tries strategies on its own steps and stays with the fastest that it can pay for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from strategies.base import Stage, Strategy

CANDIDATES = ("regional", "whole", "cuda_graph")
"""Strategies that a choice may be made among; eager always is one, and cuda_graph joins any other."""


@dataclass(kw_only=True, slots=True)
class Auto(Strategy):
    """Choose how modules are compiled, and whether steps are captured, while the run trains.

    Eager first, timed on the training's own steps. A candidate is tried only where the steps to come could pay for it.
    A helper process compiles it meanwhile, as for ``background``, where the machine has the cores. It takes over
    between two steps, is compared with eager as any strategy is, is timed on real steps, and stays if it is faster;
    else what was best before trains on. The decision, with its table, is in the record, and is remembered: a second
    run of the same program begins with what was best. ``trainer.auto`` does the work; other strategies
    (``buckets``, ``cached``, ``optimizer``) go with it as they are.
    """

    name: ClassVar[str] = "auto"
    stage: ClassVar[Stage] = Stage.MODULE
    chooser: ClassVar[str | None] = "trainer.auto.chooser:Chooser"

    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    """Strategies to choose among, of ``regional``, ``whole`` and ``cuda_graph``."""
    planned_steps: int | None = None
    """Optimizer steps that the choice is made for; null = those that this run has before it. Set it where this run
    is the first of several that go on from each other."""
    background: bool | None = None
    """Whether a helper process compiles what is tried while the training continues, as ``background`` does; null = on
    machines of four cores or more, false = the training stands still for each compile."""
    margin: float = 0.02
    """Share of a step's time that a candidate must save: less is not worth a surprise."""
    remember: bool = True
    """Whether what an earlier run of the same program, batch, machine and torch measured is used, and this one kept."""
    memory: str | None = None
    """Directory of remembered decisions; null = ``crucible/auto`` in the user's cache directory."""

    @property
    def compiles(self) -> bool:
        """Not by itself: what it tries is compared with eager when it takes over."""
        return False

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
