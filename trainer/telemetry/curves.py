"""Curves: times the steps of each window once they are through, sorts them, and says what a window's points are.

A window is the steps between two points of a curve. Its losses travel to the host while the next one is filled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict

import torch

from trainer.telemetry import meter
from trainer.telemetry.meter import Meter, NonFinite, Step, StepClock, Totals, percentile
from trainer.telemetry.record import Peak

Points = dict[str, float | None]
GROUPS = {
    "steady_steps_per_second": "speed/steps_per_second",
    "useful_tokens_per_second": "speed/useful_tokens_per_second",
}
"""Keys of the rates that come first on TensorBoard's page; the others are in ``usage/``, by their names."""


class Curves:
    """The windows of one training, of which each is read while the next one is being filled."""

    def __init__(self, measured: Meter) -> None:
        self._meter = measured
        self._steps: list[Step] = []
        self._sent: deque[tuple[list[Step], torch.Tensor | None, torch.cuda.Event | None]] = deque()
        """Of each closed window its losses, in host memory once the event has happened."""
        self.losses: list[tuple[int, float, int]] = []
        """Of each window read back: its last step, the mean loss of its steps, and their number."""
        self.nonfinite: NonFinite | None = None
        """The first step, of those read so far, whose loss was not a finite number."""
        self.steps_per_second: float | None = None

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the newest window read back."""
        return self.losses[-1][1] if self.losses else None

    def loss_points(self) -> list[list[float]]:
        """Pairs of a step and the mean loss up to it: of each window, in longer runs of two together, of four, ..."""
        every = meter.thinned(len(self.losses))
        together = [self.losses[place : place + every] for place in range(0, len(self.losses), every)]
        points = [[each[-1][0], sum(loss * n for _, loss, n in each) / sum(n for *_, n in each)] for each in together]
        return [point for point in points if math.isfinite(point[1])]

    def begin(self, clock: StepClock, peak: Peak) -> None:
        self._clock, self._peak = clock, peak

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def read(self, *, everything: bool) -> Iterator[tuple[int, Points]]:
        """Close the open window and send its losses to the host; last step and points of the windows before, oldest
        first, whose losses have arrived, of all but the newest or of ``everything``."""
        if self._steps:
            losses = [loss for step in self._steps for loss in step.losses]
            sent = _stacked(losses) if losses else None
            copied: torch.cuda.Event | None = None
            if sent is not None and sent.is_cuda:
                host = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
                sent, copied = host.copy_(sent, non_blocking=True), torch.cuda.Event()
                copied.record()
            self._sent.append((self._steps, sent, copied))
            self._steps = []
        while self._sent:
            steps, sent, copied = self._sent[0]
            if copied is not None and not (everything or len(self._sent) > 1 or copied.query()):
                return
            self._sent.popleft()
            if copied is not None:
                copied.synchronize()
            yield steps[-1].number, self._read(steps, [] if sent is None else sent.tolist())

    def time_steps(self) -> None:
        """Read the clocks of all steps so far, whose windows stay as they are; waits for the device."""
        for step in self._unread():
            self._clock.read(step)

    def look(self, *, everything: bool) -> NonFinite | None:
        """The first step whose loss was not finite, of those read so far; of ``everything``, waiting for the device."""
        steps = self._unread() if everything else []
        losses = [loss for step in steps for loss in step.losses]
        self.nonfinite = self.nonfinite or meter.first_nonfinite(steps, _stacked(losses).tolist() if losses else [])
        return self.nonfinite

    def _unread(self) -> list[Step]:
        return [*(step for steps, _, _ in self._sent for step in steps), *self._steps]

    def _read(self, steps: list[Step], losses: list[float]) -> Points:
        totals = Totals()
        for step in steps:
            self._clock.read(step)
            if self._meter.add(step):
                totals.add(step)
        if losses:
            self.losses.append((steps[-1].number, sum(losses) / len(steps), len(steps)))
        self.nonfinite = self.nonfinite or meter.first_nonfinite(steps, losses)
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


def _stacked(losses: list[torch.Tensor]) -> torch.Tensor:
    """In single precision or better: half of it may be infinite for what double precision holds."""
    stacked = torch.stack(losses)
    return stacked if stacked.dtype == torch.float64 else stacked.float()
