"""Slowdown: steps of eager and of the run by turns on the same batches, and what follows where the run is the slower.

Before the first step a few are timed on the first batch. Once there are enough steady steps, a few more are on the
batches that come next: other shapes, and steps that have meanwhile been captured. A run that is slower is reported, or
continues in eager; the record's verdict is made of the same pairs.
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
LATER_BATCHES = 3
"""Batches on which it is made then."""
MAX_SECONDS = 2.0
"""Timing on one batch takes about this long at most, but for one step of each."""
LONGEST_SECONDS = 10.0
"""No further batch is taken once timing on one has taken this long, copying of the state included."""
REPEATS = 10
MARGIN, SHARE = 1.05, 0.9
"""Slower by less than this, or in fewer of the pairs, is taken to be noise."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """Seconds of optimizer steps on one batch, taken by turns."""

    eager_seconds: list[float] = field(default_factory=list)
    compiled_seconds: list[float] = field(default_factory=list)
    replayed: bool = False
    """Whether the run's steps were replayed whole from a CUDA graph."""

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
        pairs = zip(self.eager_seconds, self.compiled_seconds, strict=True)
        slower = sum(compiled > eager_one for eager_one, compiled in pairs)
        return self.compiled_median > MARGIN * self.eager_median and slower >= SHARE * len(self.eager_seconds)

    def facts(self) -> dict[str, Any]:
        """For the record."""
        medians = {"eager_step_seconds": self.eager_median, "compiled_step_seconds": self.compiled_median}
        return {**medians, **asdict(self)}


def take_sample(
    loop: Loop,
    program: Program,
    step: Callable[[], Any],
    *,
    steps: int = 1,
    own: Callable[[], Any] | None = None,
    between: Callable[[], Any] | None = None,
) -> Sample:
    """Time ``step``, apart from the training, eager and compiled by turns, on every process; both must have run before.

    Under manual optimization it takes ``steps`` optimizer steps; the seconds are of one. ``own`` is the run's own step,
    where that is another one; ``between`` is called after each of them.
    """
    sample = Sample(replayed=own is not None)
    repeats = REPEATS
    while len(sample.eager_seconds) < repeats:
        for eagerly in (True, False) if len(sample.eager_seconds) % 2 == 0 else (False, True):
            if eagerly:
                with eager(program):
                    sample.eager_seconds.append(seconds_of(loop.device, step) / steps)
            else:
                sample.compiled_seconds.append(seconds_of(loop.device, own or step) / steps)
            if between is not None:
                between()
        if len(sample.eager_seconds) == 1:
            both = sample.eager_seconds[0] + sample.compiled_seconds[0]
            repeats = loop.broadcast(max(1, min(REPEATS, int(MAX_SECONDS / max(both * steps, 1e-9)))))
    return sample


class Slowdown:
    """Says when steps are to be timed again, and keeps what was found."""

    def __init__(self, loop: Loop, telemetry: Telemetry, sample: Sample | None) -> None:
        self._loop, self._telemetry, self._sample = loop, telemetry, sample
        self._left = LATER_BATCHES
        self.wanted = False
        """Whether the next batch should be timed."""
        self.later: list[Sample] = []

    def check(self) -> None:
        """After an optimizer step at which the telemetry has read its clock: are there enough steady steps?"""
        if not self._left or not self._loop.everywhere(self._telemetry.meter.steady.steps >= STEADY_STEPS):
            return
        self.wanted = True
        if self._loop.world_size > 1:
            # There, eager that needs more memory than one of the devices has would end the run. So it is tried only
            # under suspicion. A step of several micro-batches holds one optimizer step only, so this errs on that side.
            expected = self._loop.micro_batches * (0.0 if self._sample is None else self._sample.eager_median)
            self.wanted = self._loop.anywhere(self.steady_seconds() > MARGIN * expected)
            self._left = 1

    def take(self, sample: Sample | None, *, seconds: float) -> None:
        """A batch was timed within ``seconds`` in all; None where it could not be."""
        self._left = 0 if sample is None or self._loop.anywhere(seconds > LONGEST_SECONDS) else self._left - 1
        self.wanted = self._left > 0
        if sample is not None:
            self.later.append(sample)

    def facts(self) -> dict[str, Any]:
        """For the record: what later batches showed. ``slower`` is by all of them together."""
        together = Sample(
            eager_seconds=[seconds for one in self.later for seconds in one.eager_seconds],
            compiled_seconds=[seconds for one in self.later for seconds in one.compiled_seconds],
        )
        slower = self._loop.anywhere(bool(self.later) and together.slower)
        micro = {} if self._loop.micro_batches == 1 else {"micro_batches": self._loop.micro_batches}
        later = [one.facts() for one in self.later]
        return {"steady_step_seconds": self.steady_seconds(), "on_later_batches": later, "slower": slower, **micro}

    def steady_seconds(self) -> float:
        """Median of the steady steps so far."""
        return self._telemetry.meter.median_seconds or 0.0
