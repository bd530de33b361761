"""Loops without Lightning under the trainer's own telemetry: batches in epochs, and what is measured around a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages


class Fetching:
    """The two moments of a loop between which it waits for a batch; the telemetry hooks into them."""

    def _on_before_fetch(self) -> None:
        """The loop asks for a batch."""

    def _on_after_fetch(self) -> None:
        """It has one."""


class LoopTrainer:
    """What telemetry and record ask of Lightning's Trainer, for a loop that has none."""

    is_global_zero = True
    world_size = 1

    def __init__(self, device: torch.device, precision: str, directory: Path) -> None:
        self.strategy = SimpleNamespace(root_device=device)
        self.precision = precision
        self.default_root_dir = directory
        self.fetching = Fetching()
        self.fit_loop = SimpleNamespace(epoch_loop=self.fetching, batch_idx=0)
        self.current_epoch = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.global_step = 0

    def fit(
        self,
        step: Callable[[Any], Tensor],
        loader: Iterable[Any],
        to_device: Callable[[Any], Any],
        *,
        max_steps: int,
        telemetry: Telemetry,
    ) -> None:
        """Take ``max_steps`` steps on batches of ``loader``, measured as those of our own runs are.

        Args:
            step: Trains on a batch; returns its loss, detached.
            loader: Gives the batches of an epoch each time that it is iterated over.
            to_device: Moves a batch.
            max_steps: Batches to train on.
            telemetry: Not started yet.
        """
        trainer: Any = self
        telemetry.start(trainer, TensorBoardPages(None))
        for batch in itertools.islice(self._batches(loader), max_steps):
            batch = to_device(batch)
            telemetry.batch_start()
            loss = step(batch)
            self.global_step += 1
            telemetry.batch_end(loss, batch)
        telemetry.finish()

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Epoch after epoch, in the order that Lightning would have. Raises ValueError for a loader without batches."""
        for epoch in itertools.count():
            self.current_epoch = epoch
            set_epoch(loader, epoch)
            batches, count = iter(loader), 0
            while True:
                self.fetching._on_before_fetch()
                batch = next(batches, None)
                self.fetching._on_after_fetch()
                if batch is None:
                    break
                self.fit_loop.batch_idx = count
                count += 1
                yield batch
            if not count:
                raise ValueError("the training loader has no batches")


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell whatever decides the order of ``loader`` which epoch begins."""
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        tell = getattr(part, "set_epoch", None)
        if tell is not None:
            tell(epoch)
