"""The module that faults are planted into: attention, norms, dropout and running statistics of a few numbers each."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import Strategy
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.telemetry.record import RunRecord

WIDTH, LENGTH, ROWS = 16, 8, 8


class Block(nn.Module):
    """Attention and a hidden layer, each on top of what comes in. x_BTD: batch, positions, width."""

    def __init__(self, dropout: float, statistics: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH) if statistics else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x_BTD)).chunk(3, dim=-1)
        x_BTD = x_BTD + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        hidden = nn.functional.gelu(self.up(x_BTD))
        if self.statistics is not None:
            hidden = self.statistics(hidden.flatten(0, 1)).view_as(hidden)
        return x_BTD + self.dropout(hidden)


class Small(L.LightningModule):
    """Two blocks between a stem and a head."""

    def __init__(self, *, dropout: float = 0.0, statistics: bool = False, optimizer: Any = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout, statistics) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self._optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        x_BTD, target_BT1 = batch
        x_BTD = self.stem(x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return nn.functional.mse_loss(self.head(x_BTD), target_BT1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self._optimizer is not None:
            return self._optimizer(self.parameters())
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)


def batches(count: int, lengths: Sequence[int] = (LENGTH,), rows: Sequence[int] = (ROWS,)) -> list[Any]:
    """As many batches, whose lengths and rows come in turns."""
    made = []
    for number in range(count):
        shape = rows[number % len(rows)], lengths[number % len(lengths)]
        made.append([torch.randn(*shape, WIDTH), torch.randn(*shape, 1)])
    return made


def train(
    module: L.LightningModule,
    strategies: Sequence[Strategy],
    data: Sequence[Any],
    *,
    parity: str = "on",
    callbacks: Sequence[L.Callback] = (),
    validates: bool = True,
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> RunRecord:
    """Train on each batch once; returns the record, which an error that ends the training holds as ``record``."""
    torch._dynamo.reset()
    compile_ = Compile(list(strategies), parity=parity, measure_peak=False, **(compile_options or {}))
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(
            max_epochs=1, callbacks=[compile_, *callbacks], num_sanity_val_steps=0, default_root_dir=folder, **options
        )
        loader: Any = DataLoader(list(data), batch_size=None)
        try:
            trainer.fit(module, loader, DataLoader(list(data[:1]), batch_size=None) if validates else None)
        except Exception as error:
            error.record = compile_.record  # type: ignore[attr-defined]
            raise
    return compile_.record
