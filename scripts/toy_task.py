"""A task with next to no work in its step: what is left of the step's time is the loop around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn

from tasks.base import BatchCounts, Task


@dataclass(kw_only=True, slots=True)
class Toy(Task):
    """One Linear(4, 4) on batches of two, as in the trainer comparisons that others publish."""

    name: ClassVar[str] = "toy"

    def build_data(self, *, seed: int) -> L.LightningDataModule:
        """Random vectors."""
        return ToyData()

    def build_module(self, *, max_steps: int) -> L.LightningModule:
        """The linear layer with SGD."""
        return ToyModule()

    def count(self, batch: Any) -> BatchCounts:
        """Samples only."""
        return BatchCounts(samples=batch.shape[0])


class ToyData(L.LightningDataModule):
    """Random vectors."""

    def train_dataloader(self) -> list[Tensor]:
        """Batches of two; drawn once."""
        return list(torch.randn(8, 2, 4))


class ToyModule(L.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square of the output."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)
