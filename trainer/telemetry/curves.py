"""Curves: reads the clocks of each window once its steps are through, sorts them and writes the window's points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trainer.telemetry.clock import StepClock
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.data_wait import DataWait
from trainer.telemetry.energy import EnergyMeter
from trainer.telemetry.events import SlowStep
from trainer.telemetry.meter import Meter, NonFinite, Step, Totals, first_nonfinite
from trainer.telemetry.peak import Peak
from trainer.telemetry.scalars import cost_scalars, rate_scalars, time_scalars
from trainer.telemetry.slow_steps import SlowSteps
from trainer.telemetry.tensorboard import TensorBoardPages
from trainer.telemetry.windows import Window, Windows


class Curves:
    """The points of one training.

    Args:
        clock, wait: Read in the order of the steps, a window at a time.
        tell: Called with each slow step.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        pages: TensorBoardPages,
        clock: StepClock,
        wait: DataWait,
        meter: Meter,
        peak: Peak,
        energy: EnergyMeter,
        compiler: CompilerWatch,
        tell: Callable[[SlowStep], None],
    ) -> None:
        self._device, self._pages, self._clock, self._wait = device, pages, clock, wait
        self._meter, self._peak, self._energy, self._compiler = meter, peak, energy, compiler
        self._windows = Windows(device)
        self._slow = SlowSteps(warmup_steps=meter.warmup_steps, tell=tell)
        self.last_loss: float | None = None
        """Mean loss of the newest window read back."""
        self.nonfinite: NonFinite | None = None
        """The first step, of those read so far, whose loss was no finite number."""
        self.steps_per_second: float | None = None

    def add(self, step: Step) -> None:
        """Add a step that is over."""
        self._windows.add(step)

    def flush(self, *, everything: bool, rehearsal_seconds: float, learning_rate: float | None) -> None:
        """Close the open window; write those that have arrived, or ``everything``."""
        self._windows.close()
        for window in self._windows.readable(everything=everything):
            rates, seconds = self._read(window)
            points = {
                "train/loss": self.last_loss,
                "train/learning_rate": learning_rate,
                "throughput/steps_per_second": rates.get("steady_steps_per_second"),
                **rate_scalars(rates, self._peak),
                **time_scalars("step", seconds),
                "time/first_step_seconds": self._meter.first_step_seconds,
                "time/warmup_seconds": self._meter.warmup_seconds + rehearsal_seconds,
                "time/slow_steps": self._slow.count,
                **cost_scalars(self._compiler, self._energy, self._device),
            }
            self._pages.scalars(points, window.steps[-1].number)

    def figures(self) -> dict[str, Any]:
        """The record's fields that are found here."""
        finite = self.last_loss is not None and math.isfinite(self.last_loss)
        return {**self._slow.figures(), "final_loss": self.last_loss if finite else None}

    def look(self) -> None:
        """Read the losses of all steps so far; waits for the device."""
        self.nonfinite = self.nonfinite or first_nonfinite(*self._windows.read_now())

    def _read(self, window: Window) -> tuple[dict[str, float | None], list[float]]:
        """Rates and seconds of the window's steady steps."""
        steady, seconds = Totals(), []
        for step in window.steps:
            step.seconds = sum(self._clock.take() for _ in range(step.laps))
            step.waited_seconds = sum(self._wait.take() for _ in range(step.fetches))
            if self._meter.add(step):
                steady.add(step)
                seconds.append(step.seconds)
        losses = window.read()
        self.last_loss = sum(losses) / len(window.steps) if losses else self.last_loss
        self.nonfinite = self.nonfinite or first_nonfinite(window.steps, losses)
        self._slow.look(window.steps, seconds, window.allocations, self._compiler.events)
        rates = steady.rates()
        self.steps_per_second = rates.get("steady_steps_per_second") or self.steps_per_second
        return rates, seconds
