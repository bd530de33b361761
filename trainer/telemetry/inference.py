"""Telemetry of one inference: batches timed back to back, run by run, with the clocks and meters of a training.

A batch's latency lasts from the end of the one before to its own end, on the device where that is a CUDA GPU: the host
issues them without waiting in between, and where it is too slow for the device, its time is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.telemetry import hardware, memory
from trainer.telemetry.clock import StepClock, step_clock
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.data_wait import DataWait
from trainer.telemetry.energy import EnergyMeter
from trainer.telemetry.machine import MachineWatch
from trainer.telemetry.marks import SeenShapes
from trainer.telemetry.meter import Meter, Step, Totals
from trainer.telemetry.peak import Peak, find_peak
from trainer.telemetry.scalars import cost_scalars, rate_scalars, time_scalars
from trainer.telemetry.telemetry import BatchCounter
from trainer.telemetry.telling import Teller
from trainer.telemetry.tensorboard import TensorBoardPages

OF_WARMUP = ("first_step_seconds", "warmup_seconds", "warmup_steps", "new_shape_steps")
"""Fields of the record that a training has too; here a step is a batch."""
OF_LATENCY = ("mean", "median", "p95", "deviation", "quantiles")


class InferenceTelemetry:
    """Measures one inference; the owner calls the methods named after its moments."""

    units = ("batch", "batches")
    last_loss: float | None = None
    """There is none; the progress view asks."""

    def __init__(self, *, count: BatchCounter | None, measure_peak: bool | None) -> None:
        self.compiler = CompilerWatch()
        self.phase = "starting"
        """What is going on, in a word for the progress view."""
        self.steps_done = 0
        """Timed batches done; read by the progress view from another thread."""
        self.steps_per_second: float | None = None
        self.ready_seconds: float | None = None
        """Age of the process when the first batch was there."""
        self.teller = Teller(aloud=False)
        self.count, self._measure_peak = count, measure_peak
        self._meter = Meter(warmup_steps=0)
        self._open: list[Step] = []
        self._samples_per_second: list[float] = []
        self._shapes = SeenShapes()
        self._runs = 0
        self._number = 0

    def start(self, device: torch.device, precision: str, pages: TensorBoardPages, *, aloud: bool = True) -> None:
        """Model and data are in place; ``aloud`` on the process that tells what is otherwise silent."""
        self.teller = Teller(aloud=aloud)
        self._device, self._pages = device, pages
        self._clock: StepClock = step_clock(device)
        self._energy = EnergyMeter(device)
        self._machine = MachineWatch(self._energy.handle)
        self._peak: Peak = find_peak(device, precision, measure=self._measure_peak)
        self.wait = DataWait(device)
        memory.reset_peaks(device)

    @contextmanager
    def warmup(self, batches: int) -> Iterator[None]:
        """The batches that run inside are warm-up, ``batches`` of them."""
        self.ready_seconds = hardware.process_age_seconds()
        self.phase = "warming up"
        self._meter = Meter(warmup_steps=batches)
        self._begin()
        yield
        self._read()
        self._collect()

    @contextmanager
    def timed_run(self) -> Iterator[None]:
        """One timed run of batches."""
        self.phase = "measuring"
        if not self._runs:
            memory.reset_peaks(self._device)  # what compiling and comparing with eager took is not the model's
        self._begin()
        self._machine.begin()
        self._energy.begin()
        try:
            yield
        finally:
            self._machine.look()
            self._wait()
            self._energy.end()
            self._write(*self._read())

    def batch_start(self) -> None:
        """A batch is asked for."""
        self._compilations = self.compiler.compilations
        self.compiler.step = self._number

    def batch_end(self, batch: Any, *, disturbed: bool = False) -> None:
        """It is through; ``disturbed`` when something was prepared with it that later ones will not need."""
        self._clock.lap()
        step = Step(self._number, batches=1, laps=1, fetches=self.wait.claim())
        step.compiled = disturbed or self.compiler.compilations != self._compilations
        step.unsettled = self._shapes.new(batch) is not None and self._shapes.settle
        if self.count is not None:
            step.add(*self.count(batch))
        self._number += 1
        self._open.append(step)
        if step.disturbed:
            self._collect()
            self._energy.discard()
        elif self.phase == "measuring":
            self.steps_done += 1
            self._energy.add(step.samples or 0)
            self._energy.begin()

    def figures(self) -> dict[str, Any]:
        """The record's fields that this object measures, of this process."""
        steady, rates = self._meter.figures(), self._meter.steady.rates()
        median = statistics.median(self._samples_per_second) if self._samples_per_second else None
        spread = max(self._samples_per_second) - min(self._samples_per_second) if median else 0.0
        return {
            **{name: steady[name] for name in OF_WARMUP},
            **{f"latency_seconds_{name}": steady[f"steady_step_seconds_{name}"] for name in OF_LATENCY},
            "batches": steady["steady_steps"],
            "repeats": self._runs,
            "batches_per_second": rates.pop("steady_steps_per_second", None),
            **rates,
            "repeat_samples_per_second": list(self._samples_per_second),
            "repeat_spread": spread / median if median and len(self._samples_per_second) > 1 else None,
            **self._peak.figures(rates.get("teraflops_per_second")),
            "peak_device_memory_gib": memory.peak_device_gib(self._device),
            "peak_process_memory_gib": memory.peak_process_gib(),
            "joules_per_sample": self._energy.joules_per_sample(),
            "machine": self._machine.facts(),
        }

    def _collect(self) -> None:
        """Read what the compiler did, and tell of it what is silent."""
        self.compiler.collect()
        self.teller.events(self.compiler.untold(), warm=self.phase == "measuring")

    def _begin(self) -> None:
        self._wait()
        self.wait.forget()
        self._clock.mark()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _read(self) -> tuple[Totals, list[float]]:
        """Read the clock of the open batches: their totals and seconds, of the steady ones."""
        totals, seconds = Totals(), []
        for step in self._open:
            step.seconds = self._clock.take()
            step.waited_seconds = sum(self.wait.take() for _ in range(step.fetches))
            if self._meter.add(step):
                totals.add(step)
                seconds.append(step.seconds)
        self._open = []
        return totals, seconds

    def _write(self, totals: Totals, seconds: list[float]) -> None:
        rates = totals.rates()
        if not rates:  # stopped before its first batch, or every one of them compiled something
            return
        self._runs += 1
        if (samples := rates["samples_per_second"]) is not None:
            self._samples_per_second.append(samples)
        self.steps_per_second = rates["steady_steps_per_second"]
        points = {
            **rate_scalars(rates, self._peak),
            **time_scalars("batch", seconds),
            "time/first_step_seconds": self._meter.first_step_seconds,
            "time/warmup_seconds": self._meter.warmup_seconds,
            **cost_scalars(self.compiler, self._energy, self._device),
        }
        self._pages.scalars(points, self._runs)
