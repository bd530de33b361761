"""Batches: which of an epoch are run. A batch like one that was run has nothing more to tell."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from strategies.padding import parts_of

FIRST_BATCHES = 4
"""Run whatever their shape: optimizer state, gradient buffers and counters change over the first steps."""


class ChosenBatches:
    """A training loader over another one, which passes on the first batches and then one of each new kind.

    Args:
        loader: What the training would iterate over.
        first: Batches that are passed on whatever they are.
        most: Batches that are looked at; the epoch ends with them.
    """

    def __init__(self, loader: Iterable[Any], *, first: int, most: int) -> None:
        self._loader, self._first, self._most = loader, first, most
        self.kinds: Counter[str] = Counter()
        self.looked_at = self.run = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            kind = kind_of(batch)
            new = kind not in self.kinds
            self.kinds[kind] += 1
            self.looked_at += 1
            if new or self.run < self._first:
                self.run += 1
                yield batch
            if self.looked_at >= self._most:
                break


def wrap_training_loader(trainer: L.Trainer, wrap: Callable[[Any], Any]) -> None:
    """Have the training loop iterate over what ``wrap`` makes of its loader."""
    strategy: Any = trainer.strategy
    process = strategy.process_dataloader

    def process_dataloader(loader: Any) -> Any:
        processed = process(loader)
        return wrap(processed) if trainer.state.stage is RunningStage.TRAINING else processed

    strategy.process_dataloader = process_dataloader


def copied(batch: Any) -> Any:
    """A batch that a step may change."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a class that refuses; then steps get the same object
        return batch


def kind_of(batch: Any) -> str:
    """Dtypes and shapes of everything in a batch that is a tensor, and the types of the rest, with names."""
    return ", ".join(_described("", batch)) or "empty"


def _described(name: str, value: Any) -> Iterator[str]:
    parts = {} if isinstance(value, Tensor) else parts_of(value)
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "scalar"
        yield f"{name} {str(value.dtype).removeprefix('torch.')} {shape}".strip()
    elif not parts and value is not None:
        yield f"{name} {type(value).__name__}".strip()
    for key, part in parts.items():
        yield from _described(f"{name}.{key}" if name else key, part)
