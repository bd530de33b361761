"""Curves: reads the clocks of each window once its steps are through, sorts them and writes the window's points.

A window is the steps between two points of a curve. Its losses travel to the host while the next window is filled, so
that nothing waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from strategies.loop import Loop
from trainer.telemetry import hardware
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.files import build
from trainer.telemetry.hardware import Peak
from trainer.telemetry.machine import EnergyMeter
from trainer.telemetry.meter import (
    DataWait,
    Meter,
    NonFinite,
    Rates,
    Step,
    StepClock,
    Totals,
    first_nonfinite,
    percentile,
)
from trainer.telemetry.record import RankFigures, communication_of
from trainer.telemetry.tensorboard import TensorBoardPages


@dataclass(slots=True)
class Window:
    """Steps between two flushes."""

    steps: list[Step]
    losses: torch.Tensor | None
    """Losses of all micro-batches in order, in host memory once ``copied`` has happened."""
    copied: torch.cuda.Event | None

    @property
    def arrived(self) -> bool:
        """Whether the losses can be read without waiting."""
        return self.copied is None or self.copied.query()

    def read(self) -> list[float]:
        """Losses of all micro-batches in order. Waits for those that have not arrived."""
        if self.copied is not None:
            self.copied.synchronize()
        return [] if self.losses is None else self.losses.tolist()


class Windows:
    """Windows in order; each one is read while the next one is being filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[Window] = deque()
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def close(self) -> None:
        """End the open window and send its losses to the host."""
        if self._steps:
            self._waiting.append(Window(self._steps, *self._sent()))
            self._steps = []

    def readable(self, *, everything: bool) -> Iterator[Window]:
        """Closed windows, oldest first: those that have arrived and all but the newest, or ``everything``."""
        while self._waiting and (everything or len(self._waiting) > 1 or self._waiting[0].arrived):
            yield self._waiting.popleft()

    def unread(self) -> list[Step]:
        """The steps of all windows that are not read yet, those of the open one too, in order."""
        return [*(step for window in self._waiting for step in window.steps), *self._steps]

    def read_now(self) -> tuple[list[Step], list[float]]:
        """The steps that are not read yet, those of the open window too, and their losses; waits for the device."""
        steps = self.unread()
        losses = [loss for step in steps for loss in step.losses]
        return steps, _stacked(losses).tolist() if losses else []

    def _sent(self) -> tuple[torch.Tensor | None, torch.cuda.Event | None]:
        losses = [loss for step in self._steps for loss in step.losses]
        if not losses:
            return None, None
        stacked = _stacked(losses)
        if self._device.type != "cuda":
            return stacked, None
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied


def _stacked(losses: list[torch.Tensor]) -> torch.Tensor:
    """In single precision or better: half of it may be infinite for what double precision holds."""
    stacked = torch.stack(losses)
    return stacked if stacked.dtype == torch.float64 else stacked.float()


class Curves:
    """The points of one training.

    Args:
        clock, wait: Read in the order of the steps, a window at a time.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        pages: TensorBoardPages | None,
        clock: StepClock,
        wait: DataWait,
        meter: Meter,
        peak: Peak,
        energy: EnergyMeter,
        compiler: CompilerMonitor,
    ) -> None:
        self._device, self._pages, self._clock, self._wait = device, pages, clock, wait
        self._meter, self._peak, self._energy, self._compiler = meter, peak, energy, compiler
        self.windows = Windows(device)
        self.last_loss: float | None = None
        """Mean loss of the newest window read back."""
        self.nonfinite: NonFinite | None = None
        """The first step, of those read so far, whose loss was not a finite number."""
        self.steps_per_second: float | None = None

    def flush(self, *, everything: bool, preflight_seconds: float, learning_rate: float | None) -> None:
        """Close the open window; write those that have arrived, or ``everything``."""
        self.windows.close()
        for window in self.windows.readable(everything=everything):
            rates, seconds = self._read(window)
            points = {
                "train/loss": self.last_loss,
                "train/learning_rate": learning_rate,
                "speed/steps_per_second": rates.steady_steps_per_second,
                **rate_scalars(rates, self._peak),
                **time_scalars(seconds),
                "warmup/first_step_seconds": self._meter.first_step_seconds,
                "warmup/seconds": self._meter.warmup_seconds + preflight_seconds,
                **cost_scalars(self._compiler, self._energy, self._device),
            }
            if self._pages is not None:
                self._pages.scalars(points, window.steps[-1].number)

    def time_steps(self) -> None:
        """Read the clocks of all steps so far, whose windows stay as they are; waits for the device."""
        for step in self.windows.unread():
            time_step(step, self._clock, self._wait, self._meter)

    def look(self) -> None:
        """Read the losses of all steps so far; waits for the device."""
        self.nonfinite = self.nonfinite or first_nonfinite(*self.windows.read_now())

    def _read(self, window: Window) -> tuple[Rates, list[float]]:
        """Rates and seconds of the window's steady steps."""
        totals, seconds = read_clocks(window.steps, self._clock, self._wait, self._meter)
        losses = window.read()
        self.last_loss = sum(losses) / len(window.steps) if losses else self.last_loss
        self.nonfinite = self.nonfinite or first_nonfinite(window.steps, losses)
        rates = totals.rates()
        self.steps_per_second = rates.steady_steps_per_second or self.steps_per_second
        return rates, seconds


def time_step(step: Step, clock: StepClock, wait: DataWait, meter: Meter) -> None:
    """Read the clocks of ``step``, once; of steps in their order."""
    if not step.timed:
        step.seconds = sum(clock.take() for _ in range(step.laps))
        step.waited_seconds = sum(wait.take() for _ in range(step.fetches))
        meter.progress.add(clock.elapsed_seconds)
        step.timed = True


def read_clocks(steps: Iterable[Step], clock: StepClock, wait: DataWait, meter: Meter) -> tuple[Totals, list[float]]:
    """Time ``steps`` and add them to ``meter``: totals and seconds of the steady ones."""
    totals, seconds = Totals(), []
    for step in steps:
        time_step(step, clock, wait, meter)
        if meter.add(step):
            totals.add(step)
            seconds.append(step.seconds)
    return totals, seconds


def rate_scalars(rates: Rates, peak: Peak) -> dict[str, float | None]:
    reached = rates.teraflops_per_second
    return {
        "usage/samples_per_second": rates.samples_per_second,
        "usage/tokens_per_second": rates.tokens_per_second,
        "speed/useful_tokens_per_second": rates.useful_tokens_per_second,
        "usage/padded_share": rates.padded_share,
        "usage/teraflops_per_second": reached,
        "usage/model_flops_utilization": hardware.utilization(reached, peak.peak_teraflops_datasheet),
        "usage/model_flops_utilization_measured_peak": hardware.utilization(reached, peak.peak_teraflops_measured),
        "usage/data_wait_share": rates.data_wait_share,
    }


def time_scalars(seconds: Sequence[float]) -> dict[str, float | None]:
    median, p95 = percentile(seconds, 0.5), percentile(seconds, 0.95)
    return {
        "usage/step_milliseconds_median": None if median is None else median * 1e3,
        "usage/step_milliseconds_p95": None if p95 is None else p95 * 1e3,
    }


def cost_scalars(monitor: CompilerMonitor, energy: EnergyMeter, device: torch.device) -> dict[str, float | None]:
    names = ("compile_seconds", "graphs", "graph_breaks", "recompiles", "cache_hits", "cache_misses")
    figures = monitor.figures() if monitor.compilations else None
    return {
        **{f"warmup/{name}": getattr(figures, name, None) for name in names},
        "usage/peak_device_gib": hardware.peak_device_gib(device),
        "usage/peak_process_gib": hardware.peak_process_gib(),
        "usage/joules_per_sample": energy.joules_per_sample(),
    }


# ---- several processes ------------------------------------------------------------------------------------------
#
# What each measured is handed to the first one without a collective: through the key-value store by which the processes
# found each other. Whoever is gone has left its last figures there, and nobody waits for anybody.
# https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store

_FIRST_SAMPLES = 10
"""Iterations that DDP times one by one, most of them warm-up; after these it times every hundredth."""
_SAMPLES = 101
_RUNS = itertools.count()
"""Of this process; all processes of a group count alike."""


class Ranks:
    """The processes of one run, seen from one of them."""

    def __init__(self, loop: Loop) -> None:
        self._size, self._name = loop.world_size, f"crucible/run-{next(_RUNS)}"
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.exposed = ExposedCommunication()
        self._before: int | None = None

    def exchange(self, figures: RankFigures, step: int) -> tuple[dict[str, float | None], int]:
        """Publish the figures of a window; returns, on the first process, those of all of the window before for
        TensorBoard and its last step. By then all are through with it."""
        before, self._before = self._before, step
        self.publish(figures, step)
        return (rank_scalars(self.collect(before)) if self.rank == 0 and before is not None else {}), before or 0

    def publish(self, figures: RankFigures, moment: object) -> None:
        """Leave this process's figures of a moment, which all processes name alike, for the first one."""
        with contextlib.suppress(RuntimeError, ValueError):  # who holds the store is gone; there is none
            _store().set(f"{self._name}/{moment}/{self.rank}", json.dumps(dataclasses.asdict(figures)))

    def collect(self, moment: object) -> list[RankFigures]:
        """Figures of that moment of each process that has left some, in order; they are gone afterwards. For one
        process alone: of two, one would wait for what the other has taken."""
        found = []
        with contextlib.suppress(RuntimeError, ValueError):
            for key in (f"{self._name}/{moment}/{rank}" for rank in range(self._size)):
                if _store().check([key]):
                    found.append(build(RankFigures, json.loads(_store().get(key))))
                    _store().delete_key(key)
        return found


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


class ExposedCommunication:
    """Seconds that a step waits for collectives after its backward is through, by the timers that DDP reads every
    hundredth step anyway. There is none where the steps are not DDP's own, in a replayed CUDA graph for instance."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = _FIRST_SAMPLES

    @property
    def median_seconds(self) -> float | None:
        """Over all samples; None without any."""
        return statistics.median(self._samples) if self._samples else None

    def look(self, model: nn.Module | None) -> float | None:
        """Take the newest sample of ``model`` in, which does not wait for the device; None where there is no new
        one."""
        if not isinstance(model, nn.parallel.DistributedDataParallel) or model.logger is None:
            return None
        timed = model._get_ddp_logging_data()
        if timed.get("iteration", 0) <= self._seen or not timed.get("backward_comm_time"):
            return None
        self._seen = timed["iteration"]
        self._samples.append((timed["backward_comm_time"] - timed["backward_compute_comm_overlap_time"]) / 1e9)
        return self._samples[-1]


def rank_scalars(ranks: Sequence[RankFigures]) -> dict[str, float | None]:
    """What TensorBoard shows of all processes."""
    found, peaks = communication_of(ranks), [one.peak_device_memory_gib for one in ranks]
    known = [peak for peak in peaks if peak is not None]
    return {
        "ranks/skew_milliseconds": None if found is None else found.skew_seconds * 1e3,
        "ranks/slowest": None if found is None else found.slowest.rank,
        "ranks/exposed_communication_share": None if found is None else found.exposed_share,
        "ranks/peak_device_gib": max(known, default=None),
    }
