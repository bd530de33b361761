"""The meter: times optimizer steps, sorts them into warm-up and steady state, and turns the steady ones into rates.

A step is steady when it comes after the first ``warmup_steps``, nothing was compiled or captured during it, and its
batches have shapes that were there before: libraries plan, and allocators ask for memory, once for each (cuDNN's
attention takes 0.4 s). Both kinds are kept: the steady ones make the throughput, the others ``warmup_seconds``.

Clocks never wait for the device while it trains. On CUDA, events bracket each step, so that the time is the device's
own, idle gaps between launches included; they are read later. Elsewhere the host's monotonic clock serves.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.telemetry.machine import now

MAX_POINTS = 256
"""Of a run's progress; of more, every second is left out."""
MAX_SHAPES = 10_000
"""Shapes remembered; a run with more has no shape that is worth a report."""
FEW_SHAPES, MAX_NEW = 16, 4
"""Shapes, and new ones for each batch of one that was seen, from which on a new shape is the rule."""
MAX_TENSORS = 8
"""Tensors of a batch that are looked at."""

COUNTED = ("samples", "tokens", "useful_tokens", "flops")
"""What a step may count."""

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
    profiled: bool = False
    """Whether the profiler recorded it: neither steady nor warm-up."""
    after: str | None = None
    """The pause that it is the first step after, ``validating`` for instance."""
    unsettled: bool = False
    """Whether one of its batches has a new shape that is not steady, because others come again."""
    batches: int = 0
    """Micro-batches so far."""
    laps: int = 0
    """Laps of the clock that it is made of; more than one when a pause fell between its micro-batches."""
    samples: int | None = None
    tokens: int | None = None
    useful_tokens: int | None = None
    flops: int | None = None
    """Forward and backward operations; None when the task does not count them."""
    seconds: float = 0.0
    """Duration, set when the clock has been read."""
    timed: bool = False
    """Whether it has been."""
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


@dataclass(kw_only=True, slots=True)
class Rates:
    """Fields of the record that are over the time of steady steps; None where there is nothing to divide."""

    steady_steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    useful_tokens_per_second: float | None = None
    padded_share: float | None = None
    teraflops_per_second: float | None = None
    data_wait_share: float | None = None


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """Fields of the record about the times of single steps of this process."""

    first_step_seconds: float | None
    warmup_seconds: float | None
    warmup_steps: int
    new_shape_steps: int
    steady_steps: int
    steady_step_seconds_mean: float | None
    steady_step_seconds_median: float | None
    steady_step_seconds_p95: float | None


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
        self.steps += 1
        for name in ("seconds", "fetches", "waited_seconds", *COUNTED):
            setattr(self, name, _sum(getattr(self, name), getattr(step, name)))

    def rates(self) -> Rates:
        seconds = self.seconds
        if not seconds:
            return Rates()
        padding = None if self.tokens is None or self.useful_tokens is None else self.tokens - self.useful_tokens
        return Rates(
            steady_steps_per_second=self.steps / seconds,
            samples_per_second=None if self.samples is None else self.samples / seconds,
            tokens_per_second=None if self.tokens is None else self.tokens / seconds,
            useful_tokens_per_second=None if self.useful_tokens is None else self.useful_tokens / seconds,
            padded_share=padding / self.tokens if padding is not None and self.tokens else None,
            teraflops_per_second=None if self.flops is None else self.flops / seconds / 1e12,
            data_wait_share=min(1.0, self.waited_seconds / seconds) if self.fetches else None,
        )


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
        self.progress = Progress()
        self.steady = Totals()
        self._steady_seconds = array("d")

    @property
    def warm(self) -> bool:
        return self.ended >= self.warmup_steps

    @property
    def median_seconds(self) -> float | None:
        """Of the steady steps; None while there is none."""
        return statistics.median(self._steady_seconds) if self._steady_seconds else None

    def add(self, step: Step) -> bool:
        """Add a timed step; returns whether it is steady."""
        self._timed += 1
        if self.first_step_seconds is None:
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

    def restart(self) -> None:
        """Steps so far are warm-up for what comes, which begins with one of its own."""
        self.warmup_seconds += self.steady.seconds
        self.warmup_step_count += self.steady.steps
        self.steady, self._steady_seconds = Totals(), array("d")
        self._timed = self.ended = 0

    def times(self) -> StepTimes:
        seconds = self._steady_seconds
        return StepTimes(
            first_step_seconds=self.first_step_seconds,
            warmup_seconds=self.warmup_seconds if self.warmup_step_count else None,
            warmup_steps=self.warmup_step_count,
            new_shape_steps=self.new_shape_steps,
            steady_steps=len(seconds),
            steady_step_seconds_mean=statistics.fmean(seconds) if seconds else None,
            steady_step_seconds_median=self.median_seconds,
            steady_step_seconds_p95=percentile(seconds, 0.95),
        )


def first_nonfinite(steps: Sequence[Step], losses: Sequence[float]) -> NonFinite | None:
    """The first step of which one of its ``losses``, those of all micro-batches in order, is not a finite number."""
    place = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if place is None:
        return None
    loss = losses[place]
    for step in steps:
        if place < len(step.losses):
            break
        place -= len(step.losses)
    return step.place(f"the loss is {loss}", place)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile of ``values``; None when empty."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _sum(left: Any, right: Any) -> Any:
    return None if left is None or right is None else left + right


class _Marks:
    """Points in time of a device: CUDA events, which are used again, or readings of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._pool: list[torch.cuda.Event] = []

    def now(self) -> Any:
        if not self._on_cuda:
            return now()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two marks; waits for the device where it is not yet that far."""
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended) / 1e3)

    def reuse(self, *marks: Any) -> None:
        if self._on_cuda:
            self._pool.extend(marks)


class Progress:
    """When optimizer steps were done: each, in longer runs every second, every fourth, ..."""

    def __init__(self) -> None:
        self._every, self._steps, self._last = 1, 0, 0.0
        self._points: list[tuple[int, float]] = []

    def add(self, seconds: float) -> None:
        """One more step was done, ``seconds`` after the first one began."""
        self._steps, self._last = self._steps + 1, seconds
        if self._steps % self._every == 0:
            self._points.append((self._steps, seconds))
        if len(self._points) == MAX_POINTS:
            self._points, self._every = self._points[1::2], 2 * self._every

    def points(self, began_seconds: float) -> list[list[float]]:
        """Steps and seconds, the last step included, where the first step began at ``began_seconds``."""
        last = [] if not self._steps or self._steps % self._every == 0 else [(self._steps, self._last)]
        return [[steps, round(began_seconds + at, 4)] for steps, at in [(0, 0.0), *self._points, *last]]


class StepClock:
    """Laps of ``device``, in order; only ``take`` may wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._marks = _Marks(device)
        self._laps: deque[tuple[Any, Any]] = deque()
        self._last = self._marks.now()
        self._taken: Any = None
        self.elapsed_seconds = 0.0
        """From the first lap's begin to the end of the last one that was taken, what belongs to no lap included."""

    def mark(self) -> None:
        """Begin a lap here; what went on since the last one (validation, a checkpoint) belongs to no lap."""
        self._last = self._marks.now()

    def lap(self) -> None:
        now = self._marks.now()
        self._laps.append((self._last, now))
        self._last = now

    def take(self) -> float:
        """Seconds of the oldest lap not yet taken."""
        began, ended = self._laps.popleft()
        seconds = self._marks.seconds(began, ended)
        self.elapsed_seconds += seconds
        if self._taken is not None and self._taken is not began:
            self.elapsed_seconds += self._marks.seconds(self._taken, began)
            self._marks.reuse(self._taken)
        self._taken = ended
        self._marks.reuse(began)  # laps are read in order, so no later lap begins with this mark
        return seconds


class DataWait:
    """Seconds lost to each fetch of a batch, oldest first: what the device does not do meanwhile.

    On CUDA the host runs ahead, so that it may wait for the loader while the device still has work: marks before and
    after the fetch are that far apart on the device only when it had nothing else to do. Elsewhere the host's own wait
    is lost. Copying a batch to the device is not part of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = _Marks(device)
        self._waits: deque[tuple[Any, Any]] = deque()
        self._began: Any = None
        self._pending = 0

    def begin(self) -> None:
        self._began = self._marks.now()

    def end(self) -> None:
        if self._began is not None:
            self._waits.append((self._began, self._marks.now()))
            self._pending += 1
            self._began = None

    def claim(self) -> int:
        """Number of fetches since the last ``claim`` or ``forget``, to be read by as many calls of ``take``."""
        pending, self._pending = self._pending, 0
        return pending

    def forget(self) -> None:
        """Leave the fetches since the last ``claim`` out: they belong to no step."""
        for _ in range(self.claim()):
            self._marks.reuse(*self._waits.pop())

    def take(self) -> float:
        """Seconds lost to the oldest claimed fetch; waits for the device where it is not yet that far."""
        wait = self._waits.popleft()
        seconds = self._marks.seconds(*wait)
        self._marks.reuse(*wait)
        return seconds


class SeenShapes:
    """Tells batches of a new shape from those whose like has been."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._again = 0

    def new(self, batch: Any) -> bool:
        """Whether the shapes of ``batch`` are new."""
        shape = shape_of(batch)
        if shape in self._seen or len(self._seen) >= MAX_SHAPES:
            self._again += 1
            return False
        self._seen.add(shape)
        return True

    @property
    def settle(self) -> bool:
        """Whether shapes come again, so that one that is new costs once what a steady step does not; false for
        the very first, which the warm-up leaves out, and where most batches have a shape of their own."""
        return 1 < len(self._seen) <= FEW_SHAPES + MAX_NEW * self._again


def shape_of(batch: Any) -> tuple[Any, ...]:
    """Shapes of the first tensors of a batch: a tensor, or a sequence, mapping or object of tensors."""
    if not isinstance(batch, (tuple, list)):
        if hasattr(batch, "shape"):
            return (batch.shape,)
        batch = list(batch.values() if hasattr(batch, "values") else getattr(batch, "__dict__", {}).values())
    # Not by isinstance: of anything but a tensor, torch's own check for its class takes most of a microsecond.
    shapes = [getattr(part, "shape", None) for part in batch[:MAX_TENSORS]]
    return tuple([shape for shape in shapes if shape is not None])
