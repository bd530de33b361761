"""Probe: seconds of a training step as it is launched, and of the device's work in it, on the batch at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from strategies.graph_engine import CudaEngine
from trainer.guards.slowdown import seconds_of
from trainer.loops.lightning import LightningLoop

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


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does for a step."""

    seconds: float
    exact: bool
    """Whether the host had launched all of it before the device began; if not, it may take less than ``seconds``."""


def device_work(trainer: L.Trainer, step: Callable[[], Any], launched_seconds: float) -> Work | None:
    """What the device does for a step, the host's launches left out; None where it is no CUDA device.

    The device is kept asleep while the host launches the step, and timed once it wakes: what it does then is what a
    CUDA graph of the step would take. It may come out some percent too short: a device that has just slept runs at
    higher clocks. A step of more launches than the device's queue takes (1,024), or one that reads a value on the host,
    comes out too long, the more so the slower the host; ``captured_seconds`` does not.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    cycles = int(CALIBRATION_CYCLES * 1.5 * launched_seconds / _sleep_seconds(device, CALIBRATION_CYCLES))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    seconds, exact = trainer.strategy.broadcast(_between_events(device, step))
    return Work(seconds, exact)


def captured_seconds(trainer: L.Trainer, passes: LightningLoop, batch: Any) -> float:
    """Seconds of an optimizer step replayed from CUDA graphs, on one device.

    Forward and backward are captured for it, which costs about a step of the host and their memory once more, given
    back; the optimizer's launches fit in the queue. Raises what capturing them raises.
    """
    device = trainer.strategy.root_device
    try:
        replayed = trainer.accumulate_grad_batches * _replay_seconds(device, lambda: passes.train(batch))
        launched = seconds_of(device, passes.optimize)
        optimizer = device_work(trainer, passes.optimize, launched)
        return replayed + (launched if optimizer is None else optimizer.seconds)
    finally:
        trainer.lightning_module.zero_grad(set_to_none=True)  # they lie in the graph's memory
        torch.cuda.empty_cache()


def _replay_seconds(device: torch.device, micro_batch: Callable[[], Any]) -> float:
    engine = CudaEngine(device)
    engine.eager(micro_batch)
    torch.cuda.empty_cache()  # a graph has memory of its own
    replay, _ = engine.capture(micro_batch)
    return seconds_of(device, replay, times=LEAST_STEPS)


def _sleep_seconds(device: torch.device, cycles: int) -> float:
    torch.cuda._sleep(cycles)  # the first one loads its kernel
    torch.cuda.synchronize(device)
    return _between_events(device, lambda: torch.cuda._sleep(cycles))[0]


def _between_events(device: torch.device, work: Callable[[], Any]) -> tuple[float, bool]:
    """Seconds of ``work`` on the device, and whether it was all launched before the device began with it."""
    with torch.cuda.device(device):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        launched_first = not began.query()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3, launched_first
