"""Projects that import ``pytorch_lightning``: a copy of ``lightning.pytorch``, whose classes are others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Optimizer, Whole
from tests.processes import Pair
from trainer.callback import Compile
from trainer.sweep.in_process import compare

FAST: dict[str, Any] = {"backend": "eager"}


class Project(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Averages(pl.Callback):
    """Of the weights, at a hook within the step, which no check may call."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = [weight.detach().clone() for weight in pl_module.parameters()]

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for mean, weight in zip(self.weights, pl_module.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(0, 1, 64).view(16, 4)), batch_size=4)


def fit(folder: Path, *callbacks: Any) -> Project:
    pl.seed_everything(0, verbose=False)
    project = Project()
    trainer = pl.Trainer(
        max_steps=6, gradient_clip_val=0.1, accelerator="cpu", logger=TensorBoardLogger(folder),
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(project, loader(), loader())
    return project


def test_its_steps_are_compared_and_audited_as_those_of_lightning(tmp_path: Path) -> None:
    compile_ = Compile([Whole(**FAST), Optimizer(**FAST)], verbose=False)
    average, expected = Averages(), Averages()
    project, eager = fit(tmp_path, compile_, average), fit(tmp_path, expected)

    record = compile_.record
    assert (record.report["parity"]["verdict"], record.regions_compiled) == ("passed", 1), record.notes
    assert record.audits.verdict == "clean"
    torch.testing.assert_close(project.state_dict(), eager.state_dict())
    torch.testing.assert_close(average.weights, expected.weights)


def test_its_modules_are_compared_by_one_call() -> None:
    found = compare(
        Project(),
        loader(),
        strategies=[Whole(**FAST)],
        seconds=0.02,
        rounds=1,
        trainer={"accelerator": "cpu"},
        quiet=True,
    )

    assert [row.cell.runs[0].record.status for row in found.rows] == ["finished", "finished"]


def told_to_stop(folder: str) -> bool:
    class Told(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [Told(), Compile(verbose=False, save=False)]
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=9,
        callbacks=callbacks,
        default_root_dir=folder,
        **options,
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(Project(), loader())
    return trainer.received_sigterm


@pytest.mark.xdist_group("two_processes")
def test_a_sigterm_ends_a_training_by_the_projects_own_exception(pair: Pair, tmp_path: Path) -> None:
    assert pair(told_to_stop, str(tmp_path)) == [True, True]
