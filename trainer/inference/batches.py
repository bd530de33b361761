"""The batches of an inference: the first few kept on the device and taken in turns, or the loader's, epoch after epoch.

A last, smaller batch of an epoch is left out in both: its latency is another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.run_modes import Inference
from trainer.telemetry.meter import DataWait
from trainer.telemetry.telemetry import BatchCounter

LOADERS = ("predict_dataloader", "val_dataloader", "train_dataloader")
"""Loaders of a data module, the first one that it has is taken."""


class Batches:
    """Hands out batches on the device, without end.

    Args:
        mode: Where they come from.
        trainer: Gives data module, device and precision; what a strategy of the SHAPES stage did to its loaders holds.
        count: Counts a batch; None takes all of them as they come.
        wait: Measures what waiting for the loader costs.

    Raises:
        ValueError: A data module without loader, or whose loader yields nothing.
    """

    def __init__(self, mode: Inference, trainer: L.Trainer, *, count: BatchCounter | None, wait: DataWait) -> None:
        self._trainer, self._count, self._wait = trainer, count, wait
        self._rows: int | None = None
        self._loader: Any = trainer.strategy.process_dataloader(_loader(trainer))
        self._epoch = 0
        self.distinct: list[Any] = []
        """Batches kept on the device; empty for those of the loader."""
        if mode.source == "device":
            self.distinct = list(itertools.islice(self._epoch_of_batches(), mode.distinct_batches))
            self._batches: Iterator[Any] = itertools.cycle(self.distinct)
            # Its workers would go on loading ahead, and take the cores that launch the batches.
            self._loader = None
        else:
            self._batches = self._waited_for()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch, on the device."""
        return next(self._batches)

    def _waited_for(self) -> Iterator[Any]:
        while True:
            yield from self._epoch_of_batches()

    def _epoch_of_batches(self) -> Iterator[Any]:
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        self._epoch += 1
        iterator, taken = iter(self._loader), 0
        while True:
            self._wait.begin()
            batch = next(iterator, None)
            self._wait.end()
            if batch is None:
                break
            if self._is_smaller(batch):
                continue
            taken += 1
            yield self._moved(batch)
        if not taken:
            raise ValueError("run=inference: the loader of this task's data yields no batch")

    def _is_smaller(self, batch: Any) -> bool:
        if self._count is None:
            return False
        rows = self._count(batch)[0]
        self._rows = rows if self._rows is None else self._rows
        return rows < self._rows

    def _moved(self, batch: Any) -> Any:
        # As Lightning's loops do it, hooks of the module and the data module included.
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def loader_name(data: L.LightningDataModule) -> str:
    """The loader of ``data`` that is taken. Raises ValueError when it has none."""
    for name in LOADERS:
        if is_overridden(name, data, L.LightningDataModule):
            return name
    raise ValueError(f"run=inference: {type(data).__name__} has none of {', '.join(LOADERS)}")


def _loader(trainer: L.Trainer) -> Any:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    loader = getattr(data, loader_name(data))()
    return loader[0] if isinstance(loader, list | tuple) else loader
