"""A planted network under Lightning, and its batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.bisect.planted import WIDTH


class Trained(L.LightningModule):
    """Trains one network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(*rows: int) -> DataLoader[Any]:
    """A batch for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, WIDTH, generator=generator) for count in rows]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
