"""``compile=auto`` on a device: what a captured step would take, from steps that a host cannot launch in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer.auto.trial import Work, captured_seconds, device_work
from trainer.loops.lightning import LightningLoop
from trainer.telemetry.hardware import seconds_of

pytestmark = pytest.mark.gpu


class Deep(L.LightningModule):
    """So many small layers that a GPU waits for their launches."""

    def __init__(self, layers: int, *, reads: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        self.reads = reads

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.layers(batch[0]).square().mean()
        if self.reads:
            loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Probes(L.Callback):
    """Times the first batch's step in every way."""

    work: Work | None
    captured: float | Exception

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        passes = LightningLoop(trainer, cuda_graphs=False)
        with passes.quiet():
            for _ in range(3):
                passes.step(batch)
            launched = seconds_of(pl_module.device, lambda: passes.step(batch), times=4)
            self.work = device_work(passes, lambda: passes.step(batch), launched)
            try:
                self.captured = captured_seconds(passes, batch)
            except Exception as error:
                self.captured = error


def probed(folder: Path, layers: int, *, reads: bool = False) -> Probes:
    probes = Probes()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_steps=1, callbacks=[probes], default_root_dir=folder, **options
    )
    trainer.fit(Deep(layers, reads=reads), DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=32))
    return probes


def test_a_step_that_fits_in_the_queue_is_timed_exactly(tmp_path: Path) -> None:
    probes = probed(tmp_path, 20)
    assert probes.work is not None
    assert probes.work.exact
    assert isinstance(probes.captured, float)
    assert probes.captured == pytest.approx(probes.work.seconds, rel=0.5)


def test_of_a_longer_one_only_a_bound_is_known_until_it_is_captured(tmp_path: Path) -> None:
    probes = probed(tmp_path, 600)
    assert probes.work is not None
    assert not probes.work.exact
    assert isinstance(probes.captured, float)
    assert 0 < probes.captured < probes.work.seconds


def test_a_step_that_reads_a_value_has_a_bound_and_no_capture(tmp_path: Path) -> None:
    probes = probed(tmp_path, 20, reads=True)
    assert probes.work is not None
    assert not probes.work.exact
    assert isinstance(probes.captured, Exception)
