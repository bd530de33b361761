"""Telemetry of one inference: batches timed back to back, run by run, with the clocks and meters of a training.

A batch's latency lasts from the end of the one before to its own end, on the device where that is a CUDA GPU: the host
issues them without waiting in between, and where it is too slow for the device, its time is what counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from strategies.loop import Loop
from trainer.telemetry import hardware
from trainer.telemetry.curves import cost_scalars, rate_scalars, read_clocks, time_scalars
from trainer.telemetry.facts import with_idle_share
from trainer.telemetry.meter import Meter, Rates, Step
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import BaseTelemetry, BatchCounter
from trainer.telemetry.tensorboard import TensorBoardPages


class InferenceTelemetry(BaseTelemetry):
    """Measures one inference; the owner calls the methods named after its moments."""

    units = ("batch", "batches")
    last_loss: float | None = None
    """There is none; the progress view asks."""

    def __init__(self, *, count: BatchCounter | None, measure_peak: bool | None) -> None:
        super().__init__(count=count, measure_peak=measure_peak)
        self.steps_per_second: float | None = None
        self._meter = Meter(warmup_steps=0)
        self._open: list[Step] = []
        self._samples_per_second: list[float] = []
        self._runs = 0
        self._number = 0
        self.profiled: dict[str, Any] | None = None

    def start(self, loop: Loop, pages: TensorBoardPages) -> None:
        self._start(loop)
        self._pages = pages

    def finish(self) -> None:
        self.phase = "finishing"

    def profile(self) -> dict[str, Any] | None:
        """What the profiler found; None when it was not asked."""
        return None if self.profiled is None else with_idle_share(self.profiled, self._meter.median_seconds)

    @contextlib.contextmanager
    def warmup(self, batches: int) -> Iterator[None]:
        """The batches that run inside are warm-up, ``batches`` of them."""
        self.ready_seconds = hardware.process_age_seconds()
        self.phase = "warming up"
        self._meter = Meter(warmup_steps=batches)
        self._begin()
        yield
        self._read()
        self._collect(warm=False)

    @contextlib.contextmanager
    def timed_run(self) -> Iterator[None]:
        self.phase = "measuring"
        if not self._runs:
            hardware.reset_peaks(self._device)  # what compiling and comparing with eager took is not the model's
        self._begin()
        self._machine.begin()
        self._energy.begin()
        try:
            yield
        finally:
            self._machine.look()
            hardware.wait(self._device)
            self._energy.end()
            self._write(*self._read())

    def batch_start(self) -> None:
        self._compilations = self.compiler.compilations
        self.compiler.step = self._number

    def batch_end(self, batch: Any, *, disturbed: bool = False) -> None:
        """It is through; ``disturbed`` when something was prepared with it that later ones will not need."""
        self._clock.lap()
        step = Step(self._number, batches=1, laps=1, fetches=self.wait.claim())
        step.compiled = disturbed or self.compiler.compilations != self._compilations
        step.unsettled = self._shapes.new(batch) and self._shapes.settle
        if self.count is not None:
            step.add(*self.count(batch))
        self._number += 1
        self._open.append(step)
        if step.disturbed:
            self._collect(warm=self.phase == "measuring")
            self._energy.discard()
        elif self.phase == "measuring":
            self.steps_done += 1
            self._energy.add(step.samples or 0)
            self._energy.begin()

    def fill(self, record: RunRecord, *, together: bool) -> None:
        """Write what was measured into ``record``; ``together`` as for a training."""
        rates, times = self._meter.steady.rates(), self._meter.times()
        record.batches_per_second = rates.steady_steps_per_second
        self._fill(record, dataclasses.replace(rates, steady_steps_per_second=None), together=together)
        record.first_step_seconds, record.new_shape_steps = times.first_step_seconds, times.new_shape_steps
        record.warmup_seconds, record.warmup_steps = times.warmup_seconds, times.warmup_steps
        record.latency_seconds_mean = times.steady_step_seconds_mean
        record.latency_seconds_median = times.steady_step_seconds_median
        record.latency_seconds_p95 = times.steady_step_seconds_p95
        record.latency_seconds_deviation = times.steady_step_seconds_deviation
        record.latency_seconds_quantiles = times.steady_step_seconds_quantiles
        record.batches, record.repeats = times.steady_steps, self._runs
        speeds = record.repeat_samples_per_second = list(self._samples_per_second)
        if len(speeds) > 1:
            record.repeat_spread = (max(speeds) - min(speeds)) / statistics.median(speeds)

    def _begin(self) -> None:
        hardware.wait(self._device)
        self.wait.forget()
        self._clock.mark()

    def _read(self) -> tuple[Rates, list[float]]:
        """Rates and seconds of the open batches, of the steady ones."""
        opened, self._open = self._open, []
        totals, seconds = read_clocks(opened, self._clock, self.wait, self._meter)
        return totals.rates(), seconds

    def _write(self, rates: Rates, seconds: list[float]) -> None:
        if not seconds:  # stopped before its first batch, or every one of them compiled something
            return
        self._runs += 1
        if rates.samples_per_second is not None:
            self._samples_per_second.append(rates.samples_per_second)
        self.steps_per_second = rates.steady_steps_per_second
        points = {
            **rate_scalars(rates, self._peak),
            **time_scalars("batch", seconds),
            "warmup/first_step_seconds": self._meter.first_step_seconds,
            "warmup/seconds": self._meter.warmup_seconds,
            **cost_scalars(self.compiler, self._energy, self._device),
        }
        self._pages.scalars(points, self._runs)
