"""The arms of ``benchmark_loop``: a hand-written loop, a bare Lightning Trainer and ours, over one module and data.

Every arm trains the same module object on the same cached batches with a new optimizer of the module's own making, and
is timed by the same clock, a lap for each optimizer step. What differs is only the loop around the step. Each arm puts
its strategies on the module and takes them off again, so that arms of several strategies can take turns; compiled code
stays in the process, so that only the first turn pays for it.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from scripts.hand_loop import HandLoop, placed
from strategies import Program
from strategies.compose import apply, compiler_settings
from strategies.inplace import uncompile
from trainer.build import build_trainer, compile_callback
from trainer.checkpoints import Checkpoints
from trainer.interrupt import StopRequest
from trainer.precision import device_of, precision_arguments, resolve_precision
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry.meter import StepClock
from trainer.telemetry.record import RunRecord

WARMUP = 5
"""Steps at the beginning of each turn that are not counted: the first of them rebuild the optimizer's state."""


class CachedBatches:
    """A loader that repeats a few batches held in (pinned) host memory, so that loading is no part of the step."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), self._length)


class CachedData(L.LightningDataModule):
    """Cached batches under Lightning; moves them to the device as the task's own data module does."""

    def __init__(self, source: L.LightningDataModule, batches: list[Any], length: int) -> None:
        super().__init__()
        self._source, self._batches, self._length = source, batches, length

    def train_dataloader(self) -> CachedBatches:
        """The cached batches, over and over."""
        return CachedBatches(self._batches, self._length)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """As the task does it."""
        return self._source.transfer_batch_to_device(batch, device, dataloader_idx)


@dataclass(slots=True)
class Workload:
    """One module with its cached batches, shared by all arms of a process."""

    config: Config
    module: L.LightningModule
    source: L.LightningDataModule
    batches: list[Any]
    device: torch.device
    precision: str

    @classmethod
    def build(cls, config: Config, *, batches: int = 8) -> Workload:
        """Build module and data once; loads ``batches`` training batches."""
        L.seed_everything(config.seed, verbose=False)
        source = config.task.build_data(seed=config.seed)
        source.setup("fit")
        cached = list(itertools.islice(source.train_dataloader(), batches))
        device = device_of(config.trainer)
        if device.type == "cuda":
            cached = [torch.utils.data._utils.pin_memory.pin_memory(batch) for batch in cached]
        precision = resolve_precision(config.trainer)
        module = config.task.build_module(max_steps=1_000_000)
        return cls(config, module, source, cached, device, precision)

    def data(self, length: int) -> CachedData:
        """The cached batches as a data module of ``length`` batches an epoch."""
        return CachedData(self.source, self.batches, length)


@contextlib.contextmanager
def strategies_applied(workload: Workload) -> Iterator[None]:
    """The configured strategies on the module, for the arms that have no Compile callback."""
    declared = workload.config.task.declare()
    program = Program(module=workload.module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts)
    apply(workload.config.compile.values(), program)
    with compiler_settings(program.settings):
        yield
    uncompile(program)


def raw(workload: Workload, steps: int) -> list[float]:
    """A hand-written loop; returns the seconds of each step."""
    device = workload.device
    module = placed(workload.module, device)
    clip = workload.config.trainer.gradient_clip_val
    loop = HandLoop(module, device=device, precision=workload.precision, clip=clip)
    clock = StepClock(device)
    with strategies_applied(workload):
        clock.mark()
        for batch in CachedBatches(workload.batches, steps):
            loop.step(workload.source.transfer_batch_to_device(batch, device, 0))
            clock.lap()
    return [clock.take() for _ in range(steps)]


def bare(workload: Workload, steps: int) -> list[float]:
    """Lightning's Trainer with everything off but one callback hook that laps the clock."""
    laps = Laps()
    settings = workload.config.trainer
    trainer = L.Trainer(
        accelerator=settings.accelerator,
        devices=1,
        **precision_arguments(settings),
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=settings.gradient_clip_val,
        callbacks=[laps],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    with strategies_applied(workload):
        trainer.fit(workload.module, datamodule=workload.data(steps))
    return laps.seconds()


def ours(workload: Workload, steps: int) -> tuple[list[float], RunRecord]:
    """The trainer as the command line builds it, TensorBoard and telemetry included, plus the lap hook of ``bare``."""
    laps = Laps()
    settings = workload.config.trainer
    settings.max_steps = steps
    record = new_record(workload.config, [])
    with tempfile.TemporaryDirectory() as folder, StopRequest(print) as stop:
        directory = Path(folder)
        compile_ = compile_callback(workload.config, record)
        callbacks = [
            compile_,
            Checkpoints(directory, every_n_steps=0, stop=stop, at_end=False),
            laps,
        ]
        trainer = build_trainer(workload.config, directory, callbacks)
        trainer.fit(workload.module, datamodule=workload.data(steps))
        if compile_.program is not None:
            uncompile(compile_.program)
    return laps.seconds(), record


class Laps(L.Callback):
    """Laps the clock at the end of each batch."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the clock on the training device."""
        self._clock, self._count = StepClock(trainer.strategy.root_device), 0

    def on_train_batch_end(self, *_: Any) -> None:
        """One step is over."""
        self._clock.lap()
        self._count += 1

    def seconds(self) -> list[float]:
        """Seconds of all steps."""
        return [self._clock.take() for _ in range(self._count)]


def median(seconds: list[float]) -> float:
    """Median of the steps after the warm-up of a turn."""
    return statistics.median(seconds[WARMUP:])


def mean(seconds: list[float]) -> float:
    """Mean of the steps after the warm-up of a turn."""
    return statistics.fmean(seconds[WARMUP:])
