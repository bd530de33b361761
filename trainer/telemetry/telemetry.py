"""Telemetry of one training run: clock, compiler, memory and energy brought together at step boundaries.

The hot path (``batch_start``, ``batch_end``) keeps Python numbers and references to device scalars; nothing in it waits
for the device. Everything else happens in ``flush``, once every ``log_every_n_steps`` optimizer steps, and there too
the losses of a window are copied asynchronously and read one window later.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from trainer.telemetry import hardware, memory
from trainer.telemetry.clock import StepClock, step_clock
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.data_wait import DataWait
from trainer.telemetry.energy import EnergyMeter
from trainer.telemetry.meter import Meter, Step, Totals
from trainer.telemetry.peak import Peak, find_peak
from trainer.telemetry.scalars import cost_scalars, rate_scalars, time_scalars
from trainer.telemetry.tensorboard import TensorBoardPages

BatchCounter = Callable[[Any], tuple[int, int | None, int | None, int | None]]
"""``batch -> (samples, token positions, useful tokens, forward and backward operations)``; None for what is unknown."""


@dataclass(slots=True)
class Window:
    """Steps between two flushes, with their losses on the way to the host."""

    steps: list[Step]
    losses: torch.Tensor | None
    """Losses of all micro-batches in order, in host memory once ``copied`` has happened."""
    copied: torch.cuda.Event | None


class Telemetry:
    """Measures one fit; the owner calls the methods named after the moments of the loop."""

    units = ("step", "steps")

    def __init__(
        self,
        *,
        count: BatchCounter | None,
        warmup_steps: int,
        log_every_n_steps: int,
        measure_peak: bool | None = None,
    ) -> None:
        self.compiler = CompilerWatch()
        self.meter = Meter(warmup_steps=warmup_steps)
        self.steps_done = 0
        """Optimizer steps done; read by the progress view from another thread."""
        self.last_loss: float | None = None
        """Mean loss of the newest window read back."""
        self.steps_per_second: float | None = None
        self.pause_seconds = 0.0
        self.rehearsal_seconds: float | None = None
        self.ready_seconds: float | None = None
        """Age of the process when the first batch was on the device."""
        self.phase = "starting"
        """What the loop is doing, in a word for the progress view."""
        self._count = count
        self._every = log_every_n_steps
        self._measure_peak = measure_peak
        self._windows: deque[Window] = deque()
        self._steps: list[Step] = []
        self._paused, self._paused_at = True, 0.0
        self._running = False

    def start(self, trainer: L.Trainer, pages: TensorBoardPages) -> None:
        """Training is about to begin: model and optimizer are on their device."""
        self._trainer = trainer
        self._pages = pages
        self._device = trainer.strategy.root_device
        self._clock: StepClock = step_clock(self._device)
        self._energy = EnergyMeter(self._device)
        self._peak: Peak = find_peak(self._device, str(trainer.precision), measure=self._measure_peak)
        self._wait = DataWait(self._device)
        self._wait.watch(trainer.fit_loop.epoch_loop)
        memory.reset_peaks(self._device)
        self.steps_done = trainer.global_step
        self._begin_step()
        self._paused, self._paused_at = True, time.perf_counter()
        self._running = True

    def _begin_step(self) -> None:
        self._step = Step(self.steps_done + 1)
        self._compilations = self.compiler.compilations
        self.compiler.step = self._step.number

    def _compiler_phase(self, phase: str) -> None:
        if phase != self.compiler.phase:
            self.compiler.collect()
            self.compiler.phase = phase

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What runs inside, with the first batch on the device, comes before the first step: it is warm-up."""
        self.ready_seconds = hardware.process_age_seconds()
        self.phase = "rehearsing"
        self._compiler_phase("rehearsing")
        self.compiler.step = None
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.rehearsal_seconds = (self.rehearsal_seconds or 0.0) + time.perf_counter() - began
            self.compiler.collect()
            self.compiler.step = self._step.number
            self._paused_at = time.perf_counter()
            memory.reset_peaks(self._device)  # an eager pass for comparison is not the run's own memory

    def batch_start(self) -> None:
        """A batch is on the device and its step begins."""
        if self._paused:
            self._paused = False
            if self.ready_seconds is None:
                self.ready_seconds = hardware.process_age_seconds()
            self._compiler_phase("training")
            self._compilations = self.compiler.compilations  # what a validation compiled belongs to no step
            self.pause_seconds += time.perf_counter() - self._paused_at
            self._clock.mark()
            self._wait.forget()  # before the lap began
            self.phase = "training"
        self._step.fetches += self._wait.claim()

    def disturb(self) -> None:
        """The step under way is no steady one: something was prepared in it that later steps will not need."""
        self._step.compiled = True

    def batch_end(self, loss: torch.Tensor | None, batch: Any) -> bool:
        """A batch is through; returns whether it completed an optimizer step."""
        step = self._step
        step.batches += 1
        if self._count is not None:
            step.add(*self._count(batch))
        if loss is not None:
            step.losses.append(loss)
        done = self._trainer.global_step
        if done == self.steps_done:
            return False
        self._clock.lap()
        step.laps += 1
        self.steps_done = done
        self.meter.ended += 1
        if self.compiler.compilations != self._compilations:
            step.compiled = True
            self.compiler.collect()
        if step.compiled:
            self._energy.discard()
        elif self.meter.warm:
            self._energy.add(step.samples or 0)
            self._energy.begin()
        self._steps.append(step)
        self._begin_step()
        if done % self._every == 0:
            self.flush()
        return True

    def pause(self, phase: str) -> None:
        """``phase`` (validation, a checkpoint) begins; its time belongs to no step."""
        if not self._running:
            return
        self.phase = phase
        if phase == "validating":
            self._compiler_phase(phase)
        self._energy.end()
        if not self._paused:
            self._paused, self._paused_at = True, time.perf_counter()
            if self._step.batches:  # inside an accumulation: what was done of the step so far is a lap of its own
                self._clock.lap()
                self._step.laps += 1

    def flush(self, *, everything: bool = False) -> None:
        """Send the open window's losses to the host and write the windows that have arrived."""
        self._energy.end()  # what is closed here cannot be spoilt by a later compile
        if self._steps:
            self._windows.append(self._window(self._steps))
            self._steps = []
        while self._windows and (everything or len(self._windows) > 1 or self._arrived(self._windows[0])):
            self._write(self._windows.popleft())

    def finish(self) -> None:
        """Training is over, one way or another: read everything that is still on its way."""
        self.pause("finishing")
        self._wait.unwatch()
        self.flush(everything=True)

    def figures(self, *, together: bool) -> dict[str, Any]:
        """The record's fields that this object measures.

        ``together`` adds the rates of all processes up, for which every one of them must call this; after an error on
        one of them that would hang.
        """
        rates = self.meter.steady.rates()
        for name in ("samples_per_second", "tokens_per_second", "useful_tokens_per_second"):
            if together and rates.get(name) is not None and self._trainer.world_size > 1:
                total = self._trainer.strategy.reduce(torch.tensor(rates[name], device=self._device), reduce_op="sum")
                rates[name] = float(total)
        meter = self.meter.figures()
        if self.rehearsal_seconds is not None:
            meter["warmup_seconds"] = (meter["warmup_seconds"] or 0.0) + self.rehearsal_seconds
        return {
            **meter,
            **rates,
            "rehearsal_seconds": self.rehearsal_seconds,
            "steps": self.steps_done,
            **self._peak.figures(rates.get("teraflops_per_second")),
            "peak_device_memory_gib": memory.peak_device_gib(self._device),
            "peak_process_memory_gib": memory.peak_process_gib(),
            "joules_per_sample": self._energy.joules_per_sample(),
            "pause_seconds": self.pause_seconds,
            "final_loss": self.last_loss,
        }

    def _window(self, steps: list[Step]) -> Window:
        losses = [loss for step in steps for loss in step.losses]
        if not losses:
            return Window(steps, None, None)
        stacked = torch.stack(losses).float()
        if self._device.type != "cuda":
            return Window(steps, stacked, None)
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Window(steps, host, copied)

    @staticmethod
    def _arrived(window: Window) -> bool:
        return window.copied is None or window.copied.query()

    def _write(self, window: Window) -> None:
        steady, seconds = Totals(), []
        for step in window.steps:
            step.seconds = sum(self._clock.take() for _ in range(step.laps))
            step.waited_seconds = sum(self._wait.take() for _ in range(step.fetches))
            if self.meter.add(step):
                steady.add(step)
                seconds.append(step.seconds)
        if window.losses is not None:
            if window.copied is not None:
                window.copied.synchronize()
            per_batch = window.losses.tolist()
            self.last_loss = sum(per_batch) / len(window.steps)
        rates = steady.rates()
        self.steps_per_second = rates.get("steady_steps_per_second") or self.steps_per_second
        self._pages.scalars(self._scalars(rates, seconds), window.steps[-1].number)

    def _scalars(self, rates: dict[str, float | None], seconds: list[float]) -> dict[str, float | None]:
        return {
            "train/loss": self.last_loss,
            "train/learning_rate": float(self._trainer.optimizers[0].param_groups[0]["lr"]),
            "throughput/steps_per_second": rates.get("steady_steps_per_second"),
            **rate_scalars(rates, self._peak),
            **time_scalars("step", seconds),
            "time/first_step_seconds": self.meter.first_step_seconds,
            "time/warmup_seconds": self.meter.warmup_seconds + (self.rehearsal_seconds or 0.0),
            **cost_scalars(self.compiler, self._energy, self._device),
        }
