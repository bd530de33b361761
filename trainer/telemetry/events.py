"""Events: what a record tells of single moments: the compiler's breaks, recompiles and skips, and slow steps.

This module imports neither torch nor Lightning.
"""

from __future__ import annotations

from dataclasses import dataclass


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
