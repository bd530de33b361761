"""Probe: seconds of a training step as it is launched, and of the device's work in it, on the batch at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from trainer.timed import seconds_of

LEAST_STEPS, MOST_STEPS = 2, 8
MOST_SECONDS, MOST_SHARE = 0.25, 0.005
"""Timing one candidate takes no longer than this, in seconds and as a share of the planned run, or ``LEAST_STEPS``."""
CALIBRATION_CYCLES = 2_000_000
"""About a thousandth of a second of a GPU's clock."""


def step_seconds(trainer: L.Trainer, step: Callable[[], Any], *, about: float, planned_steps: int) -> float:
    """Seconds of a step in a row of them, as in training. The same on all processes.

    ``step`` must have run before, the last time in ``about`` seconds.
    """
    affordable = int(min(MOST_SECONDS, MOST_SHARE * planned_steps * about) / max(about, 1e-9))
    steps = int(trainer.strategy.broadcast(max(LEAST_STEPS, min(MOST_STEPS, affordable))))
    return float(trainer.strategy.broadcast(seconds_of(trainer.strategy.root_device, step, times=steps)))


def device_seconds(trainer: L.Trainer, step: Callable[[], Any], launched_seconds: float) -> float | None:
    """Seconds that the device works on a step, the host's launches left out; None where it is no CUDA device.

    The device is kept asleep while the host launches the step, and timed once it wakes: what it does then is what a
    CUDA graph of the step would take. A step longer than the launch queue, or one that reads a value on the host,
    comes out too long. It may come out some percent too short: a device that has just slept runs at higher clocks.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    cycles = int(CALIBRATION_CYCLES * 1.5 * launched_seconds / _sleep_seconds(device, CALIBRATION_CYCLES))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    return float(trainer.strategy.broadcast(_between_events(device, step)))


def _sleep_seconds(device: torch.device, cycles: int) -> float:
    torch.cuda._sleep(cycles)  # the first one loads its kernel
    torch.cuda.synchronize(device)
    return _between_events(device, lambda: torch.cuda._sleep(cycles))


def _between_events(device: torch.device, work: Callable[[], Any]) -> float:
    with torch.cuda.device(device):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3
