"""A Lightning project of somebody else: its own module, a plain DataLoader, a plain Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.modules import Block


class Blocks(L.LightningModule):
    """Three residual blocks and a head; logs its loss as most modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        x_BD = self.stem(x_BD)
        for layer in self.layers:
            x_BD = layer(x_BD)
        loss = nn.functional.mse_loss(self.head(x_BD), target_B1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Losses(L.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:  # a step that returned None has none
            self.values.append(float(outputs["loss"]))


def quiet_trainer(**options: Any) -> L.Trainer:
    """A Trainer on the CPU that leaves no files and prints nothing, but for what ``options`` say."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**{"accelerator": "cpu", **silent, **options})


def fit(module: L.LightningModule, folder: Path, callbacks: Sequence[L.Callback], **options: Any) -> list[float]:
    """Seed, train six steps and return their losses."""
    L.seed_everything(0, verbose=False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    losses = Losses()
    options = {"logger": False, "enable_checkpointing": False, "max_steps": 6, **options}
    trainer = quiet_trainer(callbacks=[losses, *callbacks], default_root_dir=folder, log_every_n_steps=2, **options)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return losses.values
