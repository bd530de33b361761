"""The watchdog: a compiled run that is slower than eager says so, or goes on eager.

Before the first step a few steps of eager and of the compiled program are timed in turns on the same batch, and kept.
Once there are enough steady steps and they are slower than that eager sample, both are timed again on the batch at
hand: other batches, a slow loader or a busy machine must not pass for a slow compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L

from strategies import Program
from trainer.eager import eager
from trainer.telemetry.telemetry import Telemetry
from trainer.timed import seconds_of

STEADY_STEPS = 20
"""Steady steps after which the comparison is made."""
MOST_SECONDS = 2.0
"""Timing takes about this long at most, but for one step of each."""
REPEATS = 3
MARGIN = 1.05
"""Slower by less than this is taken to be noise."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """Seconds of optimizer steps on one batch, taken in turns."""

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
        return {
            "eager_step_seconds": self.eager_median,
            "compiled_step_seconds": self.compiled_median,
            **asdict(self),
        }


def take_sample(trainer: L.Trainer, program: Program, step: Callable[[], Any], *, steps: int = 1) -> Sample:
    """Time ``step`` eager and compiled in turns, on every process; both must have run before.

    ``steps`` is how many optimizer steps it takes, where a module optimizes by hand; the seconds are of one.
    """
    sample = Sample()
    device = trainer.strategy.root_device

    repeats = REPEATS
    while len(sample.eager_seconds) < repeats:
        with eager(program):
            sample.eager_seconds.append(seconds_of(device, step) / steps)
        sample.compiled_seconds.append(seconds_of(device, step) / steps)
        if len(sample.eager_seconds) == 1:
            pair = sample.eager_seconds[0] + sample.compiled_seconds[0]
            affordable = max(1, min(REPEATS, int(MOST_SECONDS / max(pair * steps, 1e-9))))
            repeats = int(trainer.strategy.broadcast(affordable))
    return sample


class Watchdog:
    """Compares once, when there are steady steps enough."""

    def __init__(self, trainer: L.Trainer, telemetry: Telemetry, sample: Sample) -> None:
        self._trainer, self._telemetry, self.sample = trainer, telemetry, sample
        self.suspects = False
        """Whether the steady steps look slow, so that the next batch should be timed."""
        self.decided = False

    def look(self) -> None:
        """After an optimizer step at which the telemetry has read its clock: are the steady steps slower?"""
        if self.decided:
            return
        decide = self._trainer.strategy.reduce_boolean_decision
        if not decide(self._telemetry.meter.steady.steps >= STEADY_STEPS, all=True):
            return
        self.decided = True
        # A step of several micro-batches holds one optimizer step only, so this errs on the side of suspicion.
        batches = self._trainer.accumulate_grad_batches
        median = self.steady_seconds()
        self.suspects = decide(median > MARGIN * self.sample.eager_median * batches, all=False)

    def steady_seconds(self) -> float:
        """Median of the steady steps so far."""
        return self._telemetry.meter.median_seconds or 0.0
