"""Slowdown: steps of eager and of the run by turns on the same batches, and what follows where the run is the slower.

Before the first step a few are timed on the first batch. Once there are enough steady steps, a pair at a time is timed
on later batches: other shapes, and steps that have meanwhile been captured. Pairs lie between ordinary steps and take a
small share of the run. A run that is slower is reported, or continues in eager; the record's verdict is made of the
same pairs.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from strategies import Program
from strategies.base import eager
from strategies.loop import Loop
from trainer.telemetry.hardware import seconds_of
from trainer.telemetry.machine import now
from trainer.telemetry.telemetry import Telemetry

STEADY_STEPS = 20
"""Steady steps after which later batches are timed."""
SHARE = 0.05
"""Timing on later batches takes no more than this share of the time since training began."""
APART_STEPS = 10
"""Steps between two pairs, at least."""
ENOUGH_PAIRS, MAX_PAIRS = 8, 20
"""Pairs from which on a run may be called slower, and the most of them."""
MAX_SECONDS = 2.0
"""Timing on the first batch takes about this long at most, but for one pair."""
FIRST_PAIRS = 6
"""Pairs on the first batch."""
MARGIN, MIN_SLOWER = 1.05, 0.9
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
        return statistics.median(self.eager_seconds)

    @property
    def compiled_median(self) -> float:
        return statistics.median(self.compiled_seconds)

    @property
    def slower(self) -> bool:
        """Whether compiled is slower than eager by more than their spread."""
        pairs = zip(self.eager_seconds, self.compiled_seconds, strict=True)
        slower = sum(compiled > eager_one for eager_one, compiled in pairs)
        return self.compiled_median > MARGIN * self.eager_median and slower >= MIN_SLOWER * len(self.eager_seconds)


def take_sample(
    loop: Loop,
    program: Program,
    batch: Any,
    *,
    pairs: int = 1,
    own: Callable[[], Any] | None = None,
    restore: Callable[[], Any] = lambda: None,
    eager_first: bool = True,
) -> Sample:
    """Time up to ``pairs`` steps on ``batch``, apart from the training, eager and compiled by turns, on every process.

    ``own`` is the run's step, where that is another one: a replay, which has to find the state as its graph left it,
    and ``restore`` puts that back. Under manual optimization a step may hold several optimizer steps; the seconds are
    of one.
    """
    sample, began = Sample(replayed=own is not None), now()
    while len(sample.eager_seconds) < pairs:
        for eagerly in (eager_first, not eager_first):
            work = partial(loop.step, batch) if eagerly or own is None else own
            for _ in range(2):  # the first one brings its code and memory back, after steps of the other kind
                with eager(program) if eagerly else contextlib.nullcontext():
                    seconds = seconds_of(loop.device, work) / loop.span.steps
                if own is not None:
                    restore()
            (sample.eager_seconds if eagerly else sample.compiled_seconds).append(seconds)
        eager_first = not eager_first
        if len(sample.eager_seconds) == 1 < pairs:
            pairs = loop.broadcast(max(1, min(pairs, int(MAX_SECONDS / max(now() - began, 1e-9)))))
    return sample


class Slowdown:
    """Says at which steps a pair is to be timed, and keeps what was found."""

    def __init__(self, loop: Loop, telemetry: Telemetry, sample: Sample | None) -> None:
        self._loop, self._telemetry, self._sample = loop, telemetry, sample
        self._planned, self._next, self._spent = False, math.inf, 0.0
        self.short_of_time = True
        """Whether further pairs would be timed if the run lasted longer."""
        self.later: list[Sample] = []
        self.slower: Sample | None = None
        """All later pairs, once they show that the run is slower."""

    @property
    def wanted(self) -> bool:
        """Whether a pair is to be timed on the next batch; the same on all processes."""
        return self._next < math.inf and self._telemetry.meter.ended >= self._next

    def check(self) -> None:
        """After an optimizer step at which the telemetry has read its clock: are there enough steady steps?"""
        if self._planned or not self._loop.everywhere(len(self._telemetry.meter.steady.seconds) >= STEADY_STEPS):
            return
        self._planned = True
        # There, eager that needs more memory than one of the devices has would end the run. So it is tried only under
        # suspicion. A step of several micro-batches holds one optimizer step only, so this errs on that side.
        expected = MARGIN * self._loop.micro_batches * (self._sample.eager_median if self._sample else 0.0)
        if self._loop.world_size > 1 and not self._loop.anywhere(self.steady_seconds() > expected):
            self._end()
        else:
            self._plan(4 * self.steady_seconds())

    def take(self, sample: Sample | None, *, seconds: float = 0.0) -> None:
        """A pair was timed within ``seconds`` in all; None where it could not be."""
        if sample is None:
            self._end()
            return
        self.later.append(sample)
        self._spent += seconds
        together = self._together
        if self._loop.anywhere(len(self.later) >= ENOUGH_PAIRS and together.slower):
            self.slower = together
        if self.slower or len(self.later) >= MAX_PAIRS:
            self._end()
        else:
            self._plan(seconds)

    def _plan(self, cost: float) -> None:
        """Say when the next pair, which is going to take ``cost`` seconds, is due: by the first process's clock."""
        known = self._together if self.later else self._sample
        gap = APART_STEPS if self.later else 0
        if known is None or not known.slower or len(self.later) >= ENOUGH_PAIRS:  # a run that seems slower soon knows
            lacking = (self._spent + cost) / SHARE - (now() - self._telemetry.began)
            gap = max(gap, math.ceil(lacking / max(self.steady_seconds(), 1e-9)))
        self._next = self._loop.broadcast(self._telemetry.meter.ended + gap)

    def _end(self) -> None:
        self._next, self.short_of_time = math.inf, False

    @property
    def _together(self) -> Sample:
        return Sample(
            replayed=any(one.replayed for one in self.later),
            eager_seconds=[seconds for one in self.later for seconds in one.eager_seconds],
            compiled_seconds=[seconds for one in self.later for seconds in one.compiled_seconds],
        )

    def facts(self) -> dict[str, Any]:
        """For the record: what later batches showed."""
        micro = {} if self._loop.micro_batches == 1 else {"micro_batches": self._loop.micro_batches}
        return {"on_later_batches": [asdict(one) for one in self.later], "slower": self.slower is not None, **micro}

    def steady_seconds(self) -> float:
        return self._telemetry.meter.median_seconds or 0.0
