"""Measured: what is known about each way to compile modules, and a line of the decision's table; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EAGER = "eager"


@dataclass(slots=True, kw_only=True)
class Module:
    """A way to compile modules: ``eager``, ``regional`` or ``whole``."""

    name: str
    graphs: int = 0
    """Graphs that have to be compiled, each for training alone, over all shapes; 0 for eager."""
    leaves: int = 0
    """Modules without children in them."""
    step_seconds: float | None = None
    """Of an optimizer step as the host launches it, measured; None before."""
    device_seconds: float | None = None
    """What it would take captured; None where that was not measured."""
    at_most: bool = False
    """Whether ``device_seconds`` is only known not to be exceeded: the host did not launch the step in time."""
    cannot_capture: str | None = None
    """Why no graph can stand for its steps."""
    cold_seconds: float | None = None
    """From applying it until its first whole step was over, measured in this run or remembered; compiled anew. Without
    Inductor's import."""
    warm_seconds: float | None = None
    """The same, taken from the compiler's caches."""
    spent: bool = False
    """Whether compiling it is behind us, so that choosing it costs nothing more."""
    failed: str | None = None
    """Why it cannot be had."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the decision's table: modules compiled in one way, steps captured or not."""

    module: str
    captured: bool
    measured: bool
    """Whether the step was timed, or is expected."""
    step_seconds: float | None
    cost_seconds: float | None
    """What is still to be spent before its steady steps."""
    total_seconds: float | None
    """Both, for the planned steps."""
    at_most: bool = False
    """Whether ``step_seconds`` is only known not to be exceeded."""
    why: str = ""
    """Why it was not tried, where it was not."""

    @property
    def name(self) -> str:
        """As in ``compile=[...]``."""
        names = [name for name in (self.module,) if name != EAGER] + (["cuda_graph"] if self.captured else [])
        return "+".join(names) or EAGER

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {
            "strategies": self.name,
            "measured": self.measured,
            "step_seconds": self.step_seconds,
            "cost_seconds": self.cost_seconds,
            "total_seconds": self.total_seconds,
            **({"at_most": True} if self.at_most else {}),
            **({"why": self.why} if self.why else {}),
        }
