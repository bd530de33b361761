"""The meter: times optimizer steps, sorts them into warm-up and steady state, and turns the steady ones into rates.

A window is the steps between two points of a curve. Its losses travel to the host while the next one is filled. Every
rate in a record and on TensorBoard is made of its steps.

A step is steady when it comes after the first ``warmup_steps``, nothing was compiled or captured during it, and its
batches have shapes that were there before. (Libraries plan, and allocators ask for memory, once for each: cuDNN's
attention takes 0.4 s.) Both kinds are kept: the steady ones make the throughput, the others ``warmup_seconds``.

Clocks never wait for the device while it trains. On CUDA, events bracket each step, so that the time is the device's
own, idle gaps between launches included; they are read later. Elsewhere the host's monotonic clock serves.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from trainer.telemetry.machine_monitor import now
from trainer.telemetry.record import Peak, Rates, RunRecord

MAX_POINTS = 256
"""Of a run's progress; of more, every second is left out."""
MAX_TENSORS = 8
"""Tensors of a batch that are looked at."""
GROUPS = {
    "steady_steps_per_second": "speed/steps_per_second",
    "useful_tokens_per_second": "speed/useful_tokens_per_second",
}
"""Keys of the rates that come first on TensorBoard's page; the others are in ``usage/``, by their names."""

Counts = tuple[int | None, int | None, int | None, int | None]
"""Samples, token positions, useful tokens, and forward and backward operations; None for what is unknown."""
NonFinite = tuple[int, str]
"""A step, and where and how its loss or weights were not finite."""
Lap = tuple[Any, Any]
"""Two points in time, as ``StepClock`` marks them."""
Points = dict[str, float | None]
"""Of the curves, by their keys."""


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
    left_out: bool = False
    """Whether it was audited, or belongs to a window that is timed beside eager's: neither steady nor warm-up."""
    after: str | None = None
    """The pause that it is the first step after, ``validating`` for instance."""
    new_shape: bool = False
    """Whether one of its batches has a new shape that is not steady, because others come again."""
    batches: int = 0
    """Micro-batches so far."""
    laps: list[Lap] = field(default_factory=list)
    """What it is made of, until it is timed; several when a pause fell between its micro-batches."""
    fetches: list[Lap] = field(default_factory=list)
    """Batches asked of the loader within those laps, until it is timed."""
    counts: Counts | None = None
    """Of all its micro-batches; None where nobody counts."""
    seconds: float = 0.0
    """Duration, set when it is timed."""
    waited_seconds: float | None = None
    """Lost to waiting for batches, set when it is timed; None when it asked for none."""
    losses: list[Any] = field(default_factory=list)
    """Device scalars of its micro-batches, each already divided by their number."""

    @property
    def disturbed(self) -> bool:
        """Whether it did what later steps need not do again."""
        return self.compiled or self.new_shape

    def place(self, what: str, micro_batch: int = 0) -> NonFinite:
        """``what`` happened at one of its micro-batches."""
        rate = "" if self.learning_rate is None else f", learning rate {float(self.learning_rate):.4g}"
        return self.number, f"(epoch {self.epoch}, batch_idx {self.batch_idx + micro_batch}{rate}): {what}"

    def add(self, counts: Counts) -> None:
        """Count one more micro-batch; call it for all of them or for none."""
        self.counts = counts if self.counts is None else added(self.counts, counts)


def added(left: Counts, right: Counts) -> Counts:
    samples, tokens, useful, flops = (
        None if one is None or other is None else one + other for one, other in zip(left, right, strict=True)
    )
    return samples, tokens, useful, flops


@dataclass(slots=True)
class Totals:
    """Times and counts of a set of steps; a count that any step lacks stays None."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Of each step."""
    waited_seconds: float | None = None
    counts: Counts = (0, 0, 0, 0)

    def add(self, step: Step) -> None:
        self.seconds.append(step.seconds)
        if step.waited_seconds is not None:
            self.waited_seconds = (self.waited_seconds or 0.0) + step.waited_seconds
        self.counts = added(self.counts, step.counts or (None, None, None, None))

    def rates(self) -> Rates:
        total = sum(self.seconds)
        if not total:
            return Rates()
        _, tokens, useful_tokens, _ = self.counts
        rates = (None if count is None else count / total for count in self.counts)
        samples_rate, tokens_rate, useful_rate, flops_rate = rates
        return Rates(
            steady_steps_per_second=len(self.seconds) / total,
            samples_per_second=samples_rate,
            tokens_per_second=tokens_rate,
            useful_tokens_per_second=useful_rate,
            padded_share=(tokens - useful_tokens) / tokens if tokens and useful_tokens is not None else None,
            teraflops_per_second=None if flops_rate is None else flops_rate / 1e12,
            data_wait_share=None if self.waited_seconds is None else min(1.0, self.waited_seconds / total),
        )


class Meter:
    """The steps of one run. Each window is read while the next one is being filled."""

    def __init__(self, *, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self._steps: list[Step] = []
        """Of the open window."""
        self._sent: deque[tuple[list[Step], torch.Tensor | None, torch.cuda.Event | None]] = deque()
        """Of each closed window its losses, in host memory once the event has happened."""
        self._timed = 0
        self.ended = 0
        """Steps that are over; their times are read later."""
        self.first_step_seconds: float | None = None
        self.warmup_seconds = 0.0
        self.warmup_step_count = self.left_out_steps = 0
        self._new_shapes = array("d")
        """Seconds of steps that nothing but a new shape keeps from being steady."""
        self.steady = Totals()
        self.losses: list[tuple[int, float, int]] = []
        """Of each window read back: its last step, the mean loss of its steps, and their number."""
        self.nonfinite: NonFinite | None = None
        """The first step, of those read so far, whose loss was not a finite number."""
        self.steps_per_second: float | None = None
        """Of the newest window with a steady step; the progress view reads it from another thread."""

    def begin(self, clock: StepClock, peak: Peak) -> None:
        self._clock, self._peak = clock, peak

    @property
    def warm(self) -> bool:
        return self.ended >= self.warmup_steps

    @property
    def median_seconds(self) -> float | None:
        """Of the steady steps; None while there is none."""
        return statistics.median(self.steady.seconds) if self.steady.seconds else None

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the newest window read back."""
        return self.losses[-1][1] if self.losses else None

    def end(self, step: Step) -> None:
        """``step`` is over; it belongs to the open window."""
        self._steps.append(step)
        self.ended += 1

    def add(self, step: Step) -> bool:
        """Add a timed step; returns whether it is steady."""
        self._timed += 1
        if self.first_step_seconds is None:
            self.first_step_seconds = step.seconds
        if step.profiled:
            return False
        if step.left_out and not step.disturbed and self._timed > self.warmup_steps:
            self.left_out_steps += 1
            return False
        if step.disturbed or self._timed <= self.warmup_steps:
            if self._timed > self.warmup_steps and not step.compiled:
                self._new_shapes.append(step.seconds)
            self.warmup_seconds += step.seconds
            self.warmup_step_count += 1
            return False
        self.steady.add(step)
        return True

    def restart(self) -> None:
        """Steps so far are warm-up for what comes, which begins with one of its own."""
        self.warmup_seconds += sum(self.steady.seconds)
        self.warmup_step_count += len(self.steady.seconds)
        self.steady, self._new_shapes = Totals(), array("d")
        self._timed = self.ended = 0

    def fill(self, record: RunRecord) -> None:
        """Write the times of single steps of this process into ``record``."""
        seconds, new_shapes = self.steady.seconds, self._new_shapes
        record.first_step_seconds = self.first_step_seconds
        record.warmup_seconds = self.warmup_seconds if self.warmup_step_count else None
        record.warmup_steps, record.new_shape_steps = self.warmup_step_count, len(new_shapes)
        record.left_out_steps = self.left_out_steps
        record.steady_steps = len(seconds)
        record.steady_step_seconds_mean = mean = statistics.fmean(seconds) if seconds else None
        if mean is not None and new_shapes:
            record.new_shape_seconds = sum(new_shapes) - len(new_shapes) * mean
        record.steady_step_seconds_median = self.median_seconds
        record.steady_step_seconds_p95 = percentile(seconds, 0.95)

    def read(self, *, everything: bool) -> Iterator[tuple[int, Points]]:
        """Close the open window and send its losses to the host; last step and points of the windows before, oldest
        first, whose losses have arrived, of all but the newest or of ``everything``."""
        if self._steps:
            sent, copied = _stacked(self._steps), None
            if sent is not None and sent.is_cuda:
                host = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
                sent, copied = host.copy_(sent, non_blocking=True), torch.cuda.Event()
                copied.record()
            self._sent.append((self._steps, sent, copied))
            self._steps = []
        while self._sent:
            steps, sent, copied = self._sent[0]
            if copied is not None:
                if not (everything or len(self._sent) > 1 or copied.query()):
                    return
                copied.synchronize()
            self._sent.popleft()
            yield steps[-1].number, self._read(steps, sent)

    def _read(self, steps: list[Step], sent: torch.Tensor | None) -> Points:
        totals = Totals()
        for step in steps:
            self._clock.read(step)
            if self.add(step):
                totals.add(step)
        if sent is not None:
            self.losses.append((steps[-1].number, sum(sent.tolist()) / len(steps), len(steps)))
        self._find_nonfinite(steps, sent)
        rates = totals.rates()
        self.steps_per_second = rates.steady_steps_per_second or self.steps_per_second
        datasheet, measured = self._peak.utilization(rates.teraflops_per_second)
        milliseconds = [seconds * 1e3 for seconds in totals.seconds]
        return {
            "train/loss": self.last_loss,
            **{GROUPS.get(name, f"usage/{name}"): rate for name, rate in asdict(rates).items()},
            "usage/model_flops_utilization": datasheet,
            "usage/model_flops_utilization_measured_peak": measured,
            "usage/step_milliseconds_median": percentile(milliseconds, 0.5),
            "usage/step_milliseconds_p95": percentile(milliseconds, 0.95),
        }

    def time_steps(self) -> None:
        """Read the clocks of all steps so far, whose windows stay as they are; waits for the device."""
        for step in self._unread():
            self._clock.read(step)

    def look(self, *, everything: bool) -> NonFinite | None:
        """The first step whose loss was not finite, of those read so far; of ``everything``, waiting for the device."""
        if everything:
            steps = self._unread()
            self._find_nonfinite(steps, _stacked(steps))
        return self.nonfinite

    def _unread(self) -> list[Step]:
        return [*(step for steps, _, _ in self._sent for step in steps), *self._steps]

    def _find_nonfinite(self, steps: Sequence[Step], losses: torch.Tensor | None) -> None:
        """Look at ``losses``, those of all micro-batches of ``steps`` in order."""
        values = iter([] if losses is None else losses.tolist())
        for step in steps:
            for micro_batch, loss in enumerate(islice(values, len(step.losses))):
                if self.nonfinite is None and not math.isfinite(loss):
                    self.nonfinite = step.place(f"the loss is {loss}", micro_batch)

    def loss_points(self) -> list[list[float]]:
        """Pairs of a step and the mean loss up to it: of each window, in longer runs of two together, of four, ..."""
        every = thinned(len(self.losses))
        together = [self.losses[place : place + every] for place in range(0, len(self.losses), every)]
        points = [[each[-1][0], sum(loss * n for _, loss, n in each) / sum(n for *_, n in each)] for each in together]
        return [point for point in points if math.isfinite(point[1])]


def _stacked(steps: Sequence[Step]) -> torch.Tensor | None:
    """Losses in single precision or better: half of it may be infinite for what double precision holds."""
    losses = [loss for step in steps for loss in step.losses]
    if not losses:
        return None
    stacked = torch.stack(losses)
    return stacked if stacked.dtype == torch.float64 else stacked.float()


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile of ``values``; None when empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def thinned(points: int) -> int:
    """How many of so many points are one, so that at most ``MAX_POINTS`` are left: a power of two."""
    return 1 << max(0, math.ceil(math.log2(points / MAX_POINTS))) if points else 1


class StepClock:
    """Points in time of ``device``: CUDA events, elsewhere readings of the host's clock. Only ``read`` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._last, self._first = self.now(), None
        self.ends = array("d")
        """Of each step read: seconds from the first lap's begin to its end, what belongs to no lap included."""
        self._asked: Any = None
        self._fetches: list[Lap] = []

    def progress(self, began_seconds: float) -> list[list[float]]:
        """Pairs of steps done and seconds, where the first step began at ``began_seconds``: of each step, in longer
        runs of every second, every fourth, ..., and of the last one."""
        every, count = thinned(len(self.ends)), len(self.ends)
        done = [*range(every, count, every), *([count] if count else [])]
        return [
            [0, round(began_seconds, 4)],
            *([steps, round(began_seconds + self.ends[steps - 1], 4)] for steps in done),
        ]

    def fetch_begins(self) -> None:
        """The loop asks for a batch. What the device does not do until it is there is lost.

        On CUDA the host may wait for the loader while the device still has work. Points before and after the fetch are
        apart on the device only by the time in which it had none. Elsewhere the host's own wait is lost. Copying a
        batch to the device is not part of it.
        """
        self._asked = self.now()

    def fetch_ends(self) -> None:
        if self._asked is not None:
            self._fetches.append((self._asked, self.now()))
            self._asked = None

    def fetches(self) -> list[Lap]:
        """Those since the last call; what nobody wants belongs to no step."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def now(self) -> Any:
        if not self._on_cuda:
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """Begin a lap here; what went on since the last one (validation, a checkpoint) belongs to no lap."""
        self._last = self.now()

    def lap(self, step: Step) -> None:
        if self._first is None:
            self._first = self._last
        began, self._last = self._last, self.now()
        step.laps.append((began, self._last))

    def read(self, step: Step) -> None:
        """Time ``step``, once; steps are read in their order. Waits for the device where it is not yet that far."""
        if not step.laps:
            return
        step.seconds = sum(self.seconds(*lap) for lap in step.laps)
        if step.fetches:
            step.waited_seconds = sum(self.seconds(*fetch) for fetch in step.fetches)
        self.ends.append(self.seconds(self._first, step.laps[-1][1]))
        step.laps, step.fetches = [], []

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two points. Waits for the device where it has not come to the second one."""
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended) / 1e3)


def shape_of(batch: Any) -> tuple[Any, ...]:
    """Shapes of the first tensors of a batch: a tensor, or a sequence, mapping or object of tensors."""
    if not isinstance(batch, (tuple, list)):
        if (shape := _shape(batch)) is not None:
            return (shape,)
        batch = list(batch.values() if hasattr(batch, "values") else getattr(batch, "__dict__", {}).values())
    shapes = [_shape(part) for part in batch[:MAX_TENSORS]]
    return tuple([shape for shape in shapes if shape is not None])


def _shape(part: Any) -> Any:
    # Not by isinstance: of anything but a tensor, torch's own check for its class takes most of a microsecond.
    try:
        return getattr(part, "shape", None)
    except RuntimeError:  # a nested tensor has none
        return "nested"
