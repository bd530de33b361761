"""The meter: sorts optimizer steps into warm-up and steady state, and turns the steady ones into rates.

A step is steady when it comes after the first ``warmup_steps``, nothing was compiled or captured during it, and its
batches have shapes that were there before: libraries plan, and allocators ask for memory, once for each (cuDNN's
attention takes 0.4 s). Both kinds are kept: the steady ones make the throughput, the others ``warmup_seconds``.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

QUANTILES = 21
"""Points of a distribution of step times that a record keeps: 0%, 5%, ... 100%."""


NonFinite = tuple[int, str]
"""A step, and where and how its loss or weights were not finite."""


@dataclass(slots=True)
class Step:
    """One optimizer step on this process."""

    number: int
    """Optimizer step, counted from 1 over the whole training (resumed steps included)."""
    epoch: int = 0
    batch_idx: int = 0
    """Of its first micro-batch within the epoch."""
    learning_rate: Any = None
    """Of the first group of parameters, a number or a tensor."""
    compiled: bool = False
    """Whether the compiler ran during it or a CUDA graph was captured."""
    recompiled: bool = False
    """Of those, whether it was the compiler."""
    profiled: bool = False
    """Whether the profiler recorded it: neither steady nor warm-up."""
    after: str | None = None
    """The pause that it is the first step after, ``validating`` for instance."""
    new_shape: Any = None
    """Shapes of the first of its batches whose like had not been seen; None when all had."""
    unsettled: bool = False
    """Whether such a shape is no steady state, because others come again."""
    collected_seconds: float = 0.0
    """Host time in Python's garbage collector."""
    batches: int = 0
    """Micro-batches so far."""
    laps: int = 0
    """Laps of the clock that it is made of; more than one when a pause fell between its micro-batches."""
    samples: int | None = None
    tokens: int | None = None
    useful_tokens: int | None = None
    flops: int | None = None
    """Forward and backward operations; None when the task does not tell."""
    seconds: float = 0.0
    """Duration, set when the clock has been read."""
    fetches: int = 0
    """Batches asked of the loader within those laps."""
    waited_seconds: float = 0.0
    """Lost to waiting for them, set with ``seconds``."""
    losses: list[Any] = field(default_factory=list)
    """Device scalars of its micro-batches, each already divided by their number."""

    @property
    def disturbed(self) -> bool:
        """Whether it did what later steps need not do again."""
        return self.compiled or self.unsettled

    def place(self, what: str, micro_batch: int = 0) -> NonFinite:
        """``what`` happened at one of its micro-batches."""
        rate = "" if self.learning_rate is None else f", learning rate {float(self.learning_rate):.4g}"
        return self.number, f"(epoch {self.epoch}, batch_idx {self.batch_idx + micro_batch}{rate}): {what}"

    def add(self, samples: int, tokens: int | None, useful_tokens: int | None, flops: int | None) -> None:
        """Count one more micro-batch; call it for all of them, in order, or for none."""
        if self.samples is None:
            self.samples, self.tokens, self.useful_tokens, self.flops = samples, tokens, useful_tokens, flops
            return
        self.samples += samples
        self.tokens = _sum(self.tokens, tokens)
        self.useful_tokens = _sum(self.useful_tokens, useful_tokens)
        self.flops = _sum(self.flops, flops)


@dataclass(slots=True)
class Totals:
    """Sums over a set of steps; a figure that any step lacks stays None."""

    seconds: float = 0.0
    steps: int = 0
    fetches: int = 0
    waited_seconds: float = 0.0
    samples: int | None = 0
    tokens: int | None = 0
    useful_tokens: int | None = 0
    flops: int | None = 0

    def add(self, step: Step) -> None:
        """Add one timed step."""
        self.seconds += step.seconds
        self.steps += 1
        self.fetches += step.fetches
        self.waited_seconds += step.waited_seconds
        self.samples = _sum(self.samples, step.samples)
        self.tokens = _sum(self.tokens, step.tokens)
        self.useful_tokens = _sum(self.useful_tokens, step.useful_tokens)
        self.flops = _sum(self.flops, step.flops)

    def rates(self) -> dict[str, float | None]:
        """Per-second figures by their record field; None where there is nothing to divide."""
        if not self.seconds:
            return {}
        padding = None if self.tokens is None or self.useful_tokens is None else self.tokens - self.useful_tokens
        return {
            "steady_steps_per_second": self.steps / self.seconds,
            "samples_per_second": None if self.samples is None else self.samples / self.seconds,
            "tokens_per_second": None if self.tokens is None else self.tokens / self.seconds,
            "useful_tokens_per_second": None if self.useful_tokens is None else self.useful_tokens / self.seconds,
            "padded_share": padding / self.tokens if padding is not None and self.tokens else None,
            "teraflops_per_second": None if self.flops is None else self.flops / self.seconds / 1e12,
            "data_wait_share": min(1.0, self.waited_seconds / self.seconds) if self.fetches else None,
        }


class Meter:
    """Collects timed steps of one run."""

    def __init__(self, *, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self._timed = 0
        self.ended = 0
        """Steps that are over; their times are read later."""
        self.first_step_seconds: float | None = None
        self.warmup_seconds = 0.0
        self.warmup_step_count = 0
        self.new_shape_steps = 0
        self.steady = Totals()
        self._steady_seconds = array("d")

    @property
    def warm(self) -> bool:
        """Whether the warm-up steps are over."""
        return self.ended >= self.warmup_steps

    def add(self, step: Step) -> bool:
        """Add a timed step; returns whether it is steady."""
        self._timed += 1
        if self._timed == 1:
            self.first_step_seconds = step.seconds
        if step.profiled:
            return False
        if step.disturbed or self._timed <= self.warmup_steps:
            self.new_shape_steps += self._timed > self.warmup_steps and not step.compiled
            self.warmup_seconds += step.seconds
            self.warmup_step_count += 1
            return False
        self.steady.add(step)
        self._steady_seconds.append(step.seconds)
        return True

    def figures(self) -> dict[str, Any]:
        """The record's step-time fields of this process (rates are summed over processes by the owner)."""
        seconds = self._steady_seconds
        return {
            "first_step_seconds": self.first_step_seconds,
            "warmup_seconds": self.warmup_seconds if self.warmup_step_count else None,
            "warmup_steps": self.warmup_step_count,
            "new_shape_steps": self.new_shape_steps,
            "steady_steps": len(seconds),
            "steady_step_seconds_mean": statistics.fmean(seconds) if seconds else None,
            "steady_step_seconds_median": statistics.median(seconds) if seconds else None,
            "steady_step_seconds_p95": percentile(seconds, 0.95),
            "steady_step_seconds_deviation": statistics.stdev(seconds) if len(seconds) > 1 else None,
            "steady_step_seconds_quantiles": quantiles(seconds),
        }


def first_nonfinite(steps: Sequence[Step], losses: Sequence[float]) -> NonFinite | None:
    """The first step of which one of its ``losses``, those of all micro-batches in order, is no finite number."""
    place = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if place is None:
        return None
    for step in steps:
        if place < len(step.losses):
            break
        place -= len(step.losses)
    return step.place(f"the loss is {next(loss for loss in losses if not math.isfinite(loss))}", place)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile of ``values``; None when empty."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantiles(values: Sequence[float], *, count: int = QUANTILES) -> list[float]:
    """``count`` evenly spaced quantiles from the least to the greatest value, linear between neighbours; empty for
    fewer values than that, of which they would tell nothing new."""
    if len(values) < count:
        return []
    inner = statistics.quantiles(values, n=count - 1, method="inclusive")
    return [min(values), *inner, max(values)]


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right
