"""Events: what a record tells of single moments: the compiler's breaks, recompiles and skips, slow steps and audits.

This module imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Event:
    """A graph break, a recompile, a fallback or a skip that the compiler reported."""

    kind: str
    """``graph_break``, ``recompile``, ``fallback`` or ``cudagraph_skip``."""
    reason: str
    """The compiler's own words."""
    location: str | None = None
    """``file:line function`` of the user's code."""
    step: int | None = None
    """Optimizer step during which, or after which, it happened; None before the first step."""
    phase: str = "training"
    """``rehearsing``, ``training`` or ``validating``: validation has graphs of its own, which torch counts as
    recompiles."""


@dataclass(kw_only=True, slots=True)
class SlowStep:
    """An optimizer step that took ten times the median or more."""

    step: int
    seconds: float
    median_seconds: float
    """Median of the steady steps around it."""
    cause: str
    """A name of ``trainer.telemetry.slow_steps.CAUSES``: ``recompile``, ``data_wait``, ..., or ``unknown``."""
    detail: str | None = None
    """What is known of it: line of code, shape, seconds."""


@dataclass(kw_only=True, slots=True)
class AuditDifference:
    """How far a step was from eager's in one respect, relative to eager's."""

    what: str
    """``loss``, or the name of a parameter, of its state or of a buffer."""
    difference: float
    tolerance: float
    step: int | None = None
    """Optimizer step that was audited."""

    @property
    def share(self) -> float:
        """The difference over its tolerance; beyond 1 the step is not eager's, and no number is beyond."""
        if not self.difference:
            return 0.0
        return self.difference / self.tolerance if self.difference == self.difference and self.tolerance else math.inf


@dataclass(kw_only=True, slots=True)
class AuditFacts:
    """What the audits of a training found."""

    verdict: str
    """``clean``, ``failed``, ``went eager`` (a step differed and the rest of the run was eager) or ``not audited``."""
    reason: str | None = None
    """Why nothing was audited, or what differed."""
    steps: list[int] = field(default_factory=list)
    """Optimizer steps that were audited."""
    last_clean_step: int | None = None
    """The last of them that agreed with eager in all that was compared."""
    seconds: float = 0.0
    """Spent on them; part of no step."""
    worst: dict[str, AuditDifference] = field(default_factory=dict)
    """By kind (``loss``, ``update``, ``buffers``): the difference that came nearest to its tolerance, or beyond it."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """By kind: why it was left out of the last audit."""
    unrepeated_steps: list[int] = field(default_factory=list)
    """Audited steps with a difference that was gone when the step was repeated."""
