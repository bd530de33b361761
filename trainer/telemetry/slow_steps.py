"""Slow steps: which ones took ten times the median or more, and why, as far as what was noted beside them tells.

Everything is judged a window later, when times have been read; the hot path only leaves marks on its ``Step``.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.telemetry.events import Event, SlowStep
from trainer.telemetry.facts import number
from trainer.telemetry.meter import Step

TIMES_MEDIAN = 10.0
LEAST_STEADY = 10
"""Steady steps without which there is no median to speak of."""
RECENT = 512
"""Steady steps that the median is taken over."""
MOST_LISTED = 100
CAUSES: dict[str, str] = {
    "recompile": "the compiler ran",
    "capture": "a CUDA graph was captured",
    "data_wait": "waited for the data loader",
    "garbage_collection": "Python's garbage collector ran",
    "first_of_shape": "the first batch of its shape",
    "allocator": "the device allocator went to the driver for memory",
    "validation": "the first step after a validation",
    "checkpoint": "the first step after a checkpoint",
    "pause": "the first step after another pause",
    "unknown": "nothing was seen that explains it",
}
"""From the surest to the least sure: the first one that holds is the cause."""
AFTER = {"validating": "validation", "saving": "checkpoint"}


@dataclass(frozen=True, slots=True)
class Allocations:
    """What the device allocator did during a window."""

    retries: int = 0
    """Times it freed what it kept and asked again."""
    segments: int = 0
    """Times it asked the driver for memory."""


class SlowSteps:
    """Judges the steps of one run.

    Args:
        warmup_steps: First steps, which are expected to be slow.
        tell: Called with each slow step as it is found.
    """

    def __init__(self, *, warmup_steps: int, tell: Callable[[SlowStep], None]) -> None:
        self._warmup_left = warmup_steps
        self._tell = tell
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._waiting: deque[tuple[Step, Allocations]] = deque(maxlen=10 * RECENT)
        self._causes: Counter[str] = Counter()
        self._listed: list[SlowStep] = []
        self._known = False

    @property
    def count(self) -> int | None:
        """Slow steps so far; None while there is no median."""
        return self._causes.total() if self._known else None

    def look(
        self, steps: Iterable[Step], steady: Sequence[float], allocations: Allocations, events: Sequence[Event]
    ) -> None:
        """Judge a window of timed ``steps``, of which ``steady`` are the seconds of the steady ones."""
        for step in steps:
            step.losses = []  # read by now; a step that waits here must not hold device memory
            if self._warmup_left:
                self._warmup_left -= 1
            elif not step.profiled:
                self._waiting.append((step, allocations))
        self._recent.extend(steady)
        if len(self._recent) < LEAST_STEADY:
            return
        self._known = True
        median = statistics.median(self._recent)
        while self._waiting:
            step, during = self._waiting.popleft()
            if step.seconds >= TIMES_MEDIAN * median:
                self._add(step, median, *cause_of(step, median, during, events))

    def figures(self) -> dict[str, Any]:
        """The record's fields."""
        return {
            "slow_steps": list(self._listed),
            "slow_step_count": self.count,
            "slow_step_causes": dict(self._causes),
        }

    def _add(self, step: Step, median: float, cause: str, detail: str | None) -> None:
        slow = SlowStep(step=step.number, seconds=step.seconds, median_seconds=median, cause=cause, detail=detail)
        self._causes[cause] += 1
        if len(self._listed) < MOST_LISTED:
            self._listed.append(slow)
        self._tell(slow)


def cause_of(step: Step, median: float, during: Allocations, events: Sequence[Event]) -> tuple[str, str | None]:
    """Name of the surest cause, and what is known of it."""
    half = (step.seconds - median) / 2
    """A cause that explains less than half of what the step took too long is none."""
    if step.recompiled:
        found = [event for event in events if event.step == step.number and event.phase == "training"]
        return "recompile", found[0].location if found else None
    if step.compiled:
        return "capture", None
    if step.waited_seconds >= half:
        return "data_wait", f"{number(step.waited_seconds)} s"
    if step.collected_seconds >= half:
        return "garbage_collection", f"{number(step.collected_seconds)} s"
    if step.new_shape is not None:
        return "first_of_shape", shown(step.new_shape)
    if during.retries or during.segments:
        asked = f"{during.segments} allocations by the driver"
        return "allocator", f"{during.retries} retries, {asked} in this window" if during.retries else asked
    if step.after is not None:
        return AFTER.get(step.after, "pause"), None if step.after in AFTER else step.after
    return "unknown", None


def shown(shape: Any) -> str:
    """A batch's shape as a person writes it: ``32x3x224x224 32x58``."""
    return " ".join("x".join(map(str, each)) or "scalar" for each in shape)


def sentence(slow: SlowStep) -> str:
    """One line about a slow step."""
    line = (
        f"step {slow.step} took {number(slow.seconds)} s, {slow.seconds / slow.median_seconds:.0f} times the median: "
    )
    return line + CAUSES[slow.cause] + (f" ({slow.detail})" if slow.detail else "")


def slow_steps_table(steps: Sequence[SlowStep], count: int | None) -> str:
    """Markdown table for TensorBoard."""
    if count is None:
        return "Too few steady steps to know a median."
    if not steps:
        return f"No step took {TIMES_MEDIAN:g} times the median or more."
    lines = ["| step | seconds | times the median | cause | detail |", "|---|---|---|---|---|"]
    for slow in steps:
        times = f"{slow.seconds / slow.median_seconds:.0f}"
        detail = (slow.detail or "").replace("|", "\\|")
        lines.append(f"| {slow.step} | {slow.seconds:.4g} | {times} | {CAUSES[slow.cause]} | {detail} |")
    if count > len(steps):
        lines.append(f"\n{count - len(steps)} more are counted in the record, not listed.")
    return "\n".join(lines)
