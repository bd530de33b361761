"""Small inferences for tests: a few batches of captioning, or of a task whose module is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Strategy
from tasks.base import BatchCounts, Task
from tests.strategies.modules import Block
from tests.trainer.runs import overrides
from trainer.config import compose
from trainer.run import run
from trainer.settings import Config, Inference, TrainerConfig
from trainer.telemetry.record import RunRecord

SHORT = (
    *("run=inference", "run.batches=4", "run.repeats=2", "run.warmup_batches=2", "run.distinct_batches=2"),
    *("task.data.val_images=5", "parity=off"),
)
BATCHES, REPEATS = 4, 2


def infer(run_dir: Path, *changes: str, strategy: str = "eager", **named: str) -> RunRecord:
    """Run captioning forward under ``strategy`` in ``run_dir``."""
    command = [*overrides(strategy, **named), *SHORT, *changes]
    return run(compose(command), run_dir=run_dir, command=command)


class Plain(L.LightningModule):
    """A module with a forward and nothing else; notes in what surroundings it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))
        self.seen: list[dict[str, Any]] = []

    def forward(self, batch: list[Tensor]) -> Tensor:
        (x_BD,) = batch
        self.seen.append(
            {
                "rows": len(x_BD),
                "training": self.training,
                "gradients": torch.is_grad_enabled(),
                "inference_mode": torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
            }
        )
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.head(x_BD)


class Quiet(Plain):
    """Leaves nothing behind on the host."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        (x_BD,) = batch
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.head(x_BD)


class Rows(L.LightningDataModule):
    """Ten rows in batches of four, to train on and for nothing else."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(10, 8)), batch_size=4)


@dataclass(kw_only=True, slots=True)
class Given(Task):
    """A task of somebody else's, that builds the module it is given."""

    name: ClassVar[str] = "given"

    module: Any

    def build_module(self, *, max_steps: int) -> L.LightningModule:
        return self.module

    def build_data(self, *, seed: int) -> L.LightningDataModule:
        return Rows()

    def count(self, batch: Any) -> BatchCounts:
        return BatchCounts(samples=len(batch[0]))

    def inference_flops(self, batch: Any) -> int:
        return 1_000_000


def infer_with(
    module: L.LightningModule,
    run_dir: Path,
    *strategies: Strategy,
    trainer: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **mode: Any,
) -> RunRecord:
    """Run ``module`` forward under ``strategies``."""
    config = Config(
        task=Given(module=module),
        run=Inference(**{"batches": 4, "repeats": 2, "warmup_batches": 2, "distinct_batches": 2, **mode}),
        compile={strategy.name: strategy for strategy in strategies},
        trainer=TrainerConfig(accelerator="cpu", progress="none", precision="32-true") if trainer is None else
        TrainerConfig(**{"accelerator": "cpu", "progress": "none", **trainer}),
        **(options or {}),
    )  # fmt: skip
    return run(config, run_dir=run_dir, command=[])
