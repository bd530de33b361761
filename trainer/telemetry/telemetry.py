"""Telemetry of one training run: clock, compiler, memory and energy brought together at step boundaries.

The hot path (``batch_start``, ``batch_end``) keeps Python numbers and references to device scalars; nothing in it waits
for the device. Everything else happens in ``flush``, once every ``log_every_n_steps`` optimizer steps, and there too
the losses of a window are copied asynchronously and read one window later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from trainer.telemetry import hardware, memory
from trainer.telemetry.clock import StepClock, step_clock
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.curves import Curves
from trainer.telemetry.data_wait import DataWait
from trainer.telemetry.energy import PAUSES, EnergyMeter, PhaseEnergy
from trainer.telemetry.machine import MachineWatch
from trainer.telemetry.marks import CollectorWatch, SeenShapes
from trainer.telemetry.meter import Meter, NonFinite, Step
from trainer.telemetry.peak import Peak, find_peak
from trainer.telemetry.profile_page import with_idle_share
from trainer.telemetry.profile_steps import ProfiledSteps
from trainer.telemetry.scalars import added_up
from trainer.telemetry.telling import Teller
from trainer.telemetry.tensorboard import TensorBoardPages

BatchCounter = Callable[[Any], tuple[int, int | None, int | None, int | None]]
"""``batch -> (samples, token positions, useful tokens, forward and backward operations)``; None for what is unknown."""


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
        profile_steps: int | None = None,
    ) -> None:
        self.compiler = CompilerWatch()
        self.meter = Meter(warmup_steps=warmup_steps)
        self.steps_done = 0
        """Optimizer steps done; read by the progress view from another thread."""
        self.pause_seconds = 0.0
        self.rehearsal_seconds: float | None = None
        self.audit_seconds = 0.0
        self.ready_seconds: float | None = None
        """Age of the process when the first batch was on the device."""
        self.phase = "starting"
        """What the loop is doing, in a word for the progress view."""
        self._count = count
        self._every = log_every_n_steps
        self._measure_peak = measure_peak
        self._profile_steps = profile_steps
        self._profiled: ProfiledSteps | None = None
        self._collector, self._shapes, self.teller = CollectorWatch(), SeenShapes(), Teller(aloud=False)
        self._curves: Curves | None = None
        self._after: str | None = None
        self._paused, self._paused_at = True, 0.0
        self._running = False

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the newest window read back; read by the progress view, like the next one."""
        return None if self._curves is None else self._curves.last_loss

    @property
    def steps_per_second(self) -> float | None:
        """Steady optimizer steps of that window."""
        return None if self._curves is None else self._curves.steps_per_second

    def start(self, trainer: L.Trainer, pages: TensorBoardPages) -> None:
        """Training is about to begin: model and optimizer are on their device."""
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._clock: StepClock = step_clock(self._device)
        self._energy = EnergyMeter(self._device)
        self._machine = MachineWatch(self._energy.handle)
        self._peak: Peak = find_peak(self._device, str(trainer.precision), measure=self._measure_peak)
        self._wait = DataWait(self._device)
        self._wait.watch(trainer.fit_loop.epoch_loop)
        self._phases = PhaseEnergy(self._energy.reader)
        self.teller = Teller(aloud=trainer.is_global_zero)
        self._curves = Curves(
            device=self._device,
            pages=pages,
            clock=self._clock,
            wait=self._wait,
            meter=self.meter,
            peak=self._peak,
            energy=self._energy,
            compiler=self.compiler,
            tell=self.teller.slow,
        )
        self._collector.start()
        if self._profile_steps is not None:
            directory = Path(trainer.default_root_dir) if trainer.is_global_zero else None
            self._profiled = ProfiledSteps(self._profile_steps, self._device, directory)
        memory.reset_peaks(self._device)
        self.steps_done = trainer.global_step
        self.last_step = Step(self.steps_done)
        self._begin_step()
        self._paused, self._paused_at = True, time.perf_counter()
        self._running = True

    def _begin_step(self) -> None:
        self._step = Step(self.steps_done + 1)
        self._compilations = self.compiler.compilations
        self.compiler.step = self._step.number

    def _compiler_phase(self, phase: str) -> None:
        if phase != self.compiler.phase:
            self._collect(warm=self.meter.warm)
            self.compiler.phase = phase

    def _collect(self, *, warm: bool) -> None:
        """Read what the compiler did, and tell of it what is silent; ``warm`` as for ``Teller.events``."""
        self.compiler.collect()
        self.teller.events(self.compiler.untold(), warm=warm)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What runs inside, with the first batch on the device, comes before the first step: it is warm-up."""
        if self.ready_seconds is None:
            self.ready_seconds = hardware.process_age_seconds()
        self.phase = "rehearsing"
        self._compiler_phase("rehearsing")
        self._phases.enter("rehearsal")
        self.compiler.step = None
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait_for_device()
            self.rehearsal_seconds = (self.rehearsal_seconds or 0.0) + time.perf_counter() - began
            self._collect(warm=False)
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
            self._collector.take()
            self._step.after, self._after = self._after, None
            self._phases.enter("steady" if self.meter.warm else "warmup")
            if self.meter.warm:
                self._machine.begin()
            self.phase = "profiling" if self._profiled is not None and self._profiled.recording else "training"
        self._step.fetches += self._wait.claim()
        if not self._step.batches:
            self._step.epoch, self._step.batch_idx = self._trainer.current_epoch, self._trainer.fit_loop.batch_idx
            rate = self._learning_rate
            self._step.learning_rate = rate.clone() if isinstance(rate, torch.Tensor) else rate

    def disturb(self) -> None:
        """The step under way is no steady one: something was prepared in it that later steps will not need."""
        self._step.compiled = True

    def batch_end(self, loss: torch.Tensor | None, batch: Any) -> bool:
        """A batch is through; returns whether it completed an optimizer step."""
        step = self._step
        step.batches += 1
        if self._count is not None:
            step.add(*self._count(batch))
        if (shape := self._shapes.new(batch)) is not None:
            step.new_shape, step.unsettled = shape, step.unsettled or self._shapes.settle
        if loss is not None:
            step.losses.append(loss)
        done = self._trainer.global_step
        if done == self.steps_done:
            return False
        self._clock.lap()
        step.laps += 1
        step.collected_seconds = self._collector.take()
        self.steps_done = done
        was_warm = self.meter.warm
        self.meter.ended += 1
        if self.compiler.compilations != self._compilations:
            step.compiled = step.recompiled = True
            self._collect(warm=was_warm)
        starts = self._profiled is not None and self._profiled.due(step, warm=was_warm)
        if step.disturbed or step.profiled:
            self._energy.discard()
        elif self.meter.warm:
            self._energy.add(step.samples or 0)
            self._energy.begin()
        if self.meter.warm and not was_warm:
            self._phases.enter("steady")
            self._machine.begin()
        assert self._curves is not None
        self._curves.add(step)
        self.last_step = step
        self._begin_step()
        if done % self._every == 0:
            self.flush()
        if self._profiled is not None and (starts or self._profiled.full):
            self.pause("profiling")
            if starts:
                self._profiled.start()
        return True

    @contextlib.contextmanager
    def auditing(self) -> Iterator[None]:
        """What runs inside is an audit's: it belongs to no step, although one is under way."""
        if self.phase == "auditing":
            yield
            return
        if self.compiler.compilations != self._compilations:
            self._step.compiled = self._step.recompiled = True
        self.pause("auditing", within_step=True)
        self._wait_for_device()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait_for_device()
            self.audit_seconds += time.perf_counter() - began
            self.batch_start()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def pause(self, phase: str, *, within_step: bool = False) -> None:
        """``phase`` (validation, a checkpoint) begins; its time belongs to no step."""
        if not self._running:
            return
        self.phase = phase
        if phase == "validating":
            self._compiler_phase(phase)
        self._energy.end()
        self._phases.enter(PAUSES.get(phase, "other"))
        self._after = phase
        if not self._paused:
            self._paused, self._paused_at = True, time.perf_counter()
            if (
                within_step or self._step.batches
            ):  # inside an accumulation: what was done of the step so far is a lap of its own
                self._clock.lap()
                self._step.laps += 1
        if self._profiled is not None and self._profiled.recording:  # what a pause does is no part of a step
            self._step.profiled = within_step or self._step.batches > 0  # recorded in part: no steady one either
            self._profiled.stop()

    def flush(self, *, everything: bool = False) -> None:
        """Send the open window's losses to the host and write the windows that have arrived."""
        self._energy.end()  # what is closed here cannot be spoilt by a later compile
        self._machine.look()
        assert self._curves is not None
        rate = self._learning_rate
        self._curves.flush(
            everything=everything,
            rehearsal_seconds=self.rehearsal_seconds or 0.0,
            learning_rate=None if rate is None else float(rate),
        )

    @property
    def _learning_rate(self) -> Any:
        """Of the first group; None for optimizers that a module keeps to itself: Lightning then has a mock of one."""
        return next((group["lr"] for each in self._trainer.optimizers for group in each.param_groups), None)

    def nonfinite(self, *, everything: bool) -> NonFinite | None:
        """The first step whose loss was not finite, of those read so far; of ``everything``, waiting for the device."""
        if self._curves is None:
            return None
        if everything:
            self._curves.look()
        return self._curves.nonfinite

    def finish(self) -> None:
        """Training is over, one way or another: read everything that is still on its way."""
        self.pause("finishing")
        self._wait.unwatch()
        self._collector.stop()
        if self._profiled is not None:
            self._profiled.finish()
        self.flush(everything=True)

    def figures(self, *, together: bool) -> dict[str, Any]:
        """The record's fields that this object measures.

        ``together`` adds the rates of all processes up, for which every one of them must call this; after an error on
        one of them that would hang.
        """
        rates = self.meter.steady.rates()
        rates |= added_up(rates, self._trainer) if together else {}
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
            "joules_by_phase": self._phases.figures(),
            "machine": self._machine.facts(),
            **(self._curves.figures() if self._curves is not None else {}),
            "pause_seconds": self.pause_seconds,
        }

    def profile(self) -> dict[str, Any] | None:
        """What the profiler found, for the record's report; None when it was not asked."""
        if self._profiled is None:
            return None
        return with_idle_share(self._profiled.facts, self.meter.figures()["steady_step_seconds_median"])
