"""Slowdown: a compiled run that is slower than eager is reported, or continues in eager.

Before the first step a few steps of eager and of the compiled program are timed by turns on the same batch, and kept.
Once there are enough steady steps and they are slower than that eager sample, both are timed again on the batch at
hand: other batches, a slow loader or a busy machine must not pass for a slow compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from strategies import Program
from strategies.compose import eager
from strategies.loop import Loop
from trainer.telemetry.hardware import seconds_of
from trainer.telemetry.telemetry import Telemetry

STEADY_STEPS = 20
"""Steady steps after which the comparison is made."""
MAX_SECONDS = 2.0
"""Timing takes about this long at most, but for one step of each."""
REPEATS = 3
MARGIN = 1.05
"""Slower by less than this is taken to be noise."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """Seconds of optimizer steps on one batch, taken by turns."""

    eager_seconds: list[float] = field(default_factory=list)
    compiled_seconds: list[float] = field(default_factory=list)

    @property
    def eager_median(self) -> float:
        """Seconds of a step of eager."""
        return statistics.median(self.eager_seconds)

    @property
    def compiled_median(self) -> float:
        """Seconds of a compiled step."""
        return statistics.median(self.compiled_seconds)

    @property
    def slower(self) -> bool:
        """Whether compiled is slower than eager by more than their spread."""
        return self.compiled_median > MARGIN * self.eager_median and min(self.compiled_seconds) > self.eager_median

    def facts(self) -> dict[str, Any]:
        """For the record."""
        medians = {"eager_step_seconds": self.eager_median, "compiled_step_seconds": self.compiled_median}
        return {**medians, **asdict(self)}


def take_sample(loop: Loop, program: Program, step: Callable[[], Any], *, steps: int = 1) -> Sample:
    """Time ``step`` eager and compiled by turns, on every process; both must have run before.

    ``steps`` is how many optimizer steps it takes, under manual optimization; the seconds are of one.
    """
    sample = Sample()
    repeats = REPEATS
    while len(sample.eager_seconds) < repeats:
        with eager(program):
            sample.eager_seconds.append(seconds_of(loop.device, step) / steps)
        sample.compiled_seconds.append(seconds_of(loop.device, step) / steps)
        if len(sample.eager_seconds) == 1:
            both = sample.eager_seconds[0] + sample.compiled_seconds[0]
            repeats = loop.broadcast(max(1, min(REPEATS, int(MAX_SECONDS / max(both * steps, 1e-9)))))
    return sample


class Slowdown:
    """Compares steady steps with ``sample`` once, when there are enough of them."""

    def __init__(self, loop: Loop, telemetry: Telemetry, sample: Sample) -> None:
        self._loop, self._telemetry, self.sample = loop, telemetry, sample
        self.suspected = False
        """Whether the steady steps look slow, so that the next batch should be timed."""
        self._decided = False

    def check(self) -> None:
        """After an optimizer step at which the telemetry has read its clock: are the steady steps slower?"""
        if self._decided or not self._loop.everywhere(self._telemetry.meter.steady.steps >= STEADY_STEPS):
            return
        self._decided = True
        # A step of several micro-batches holds one optimizer step only, so this errs on the side of suspicion.
        expected = self.sample.eager_median * self._loop.micro_batches
        self.suspected = self._loop.anywhere(self.steady_seconds() > MARGIN * expected)

    def steady_seconds(self) -> float:
        """Median of the steady steps so far."""
        return self._telemetry.meter.median_seconds or 0.0
