"""``trainer.precision=16-mixed``: a gradient scaler under every strategy, with clipping of fused optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Optimizer, Strategy
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.recording import Recorded
from tests.trainer.runs import curve, relative_differences, train
from trainer.build import Mixed
from trainer.callback import Compile
from trainer.telemetry.record import RunRecord


class Fused(L.LightningModule):
    """A line with AdamW, fused or not; its first batch may overflow."""

    def __init__(self, *, fused: bool, overflow: bool = False, notes: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.fused, self.overflow, self.notes = fused, overflow, notes
        self.weights: list[Tensor] = []
        self.record = RunRecord(task="fused")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.notes:
            self.weights.append(self.net[0].weight.detach().clone())
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        return loss * float("inf") if self.overflow and len(self.weights) == 2 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=self.fused)


def weights_of(module: Fused, plugin: MixedPrecision, folder: Path, *strategies: Strategy) -> list[Tensor]:
    """Weights before each of six steps of a seeded training that clips, and after the last one."""
    torch.manual_seed(0)
    for layer in (module.net[0], module.net[2]):
        layer.reset_parameters()
    trainer = quiet_trainer(
        plugins=[plugin],
        callbacks=[Compile(strategies, parity="off", record=module.record)],
        max_steps=6,
        gradient_clip_val=0.1,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4))
    return [*module.weights, module.net[0].weight.detach().clone()]


def ours() -> Mixed:
    return Mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def test_a_fused_optimizer_is_clipped_as_lightning_clips_one_that_is_not(tmp_path: Path) -> None:
    lightnings = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    expected = weights_of(Fused(fused=False), lightnings, tmp_path)
    torch.testing.assert_close(weights_of(Fused(fused=True), ours(), tmp_path), expected)
    torch.testing.assert_close(weights_of(Fused(fused=False), ours(), tmp_path), expected)


@pytest.mark.parametrize("strategies", [(), (Optimizer(backend="eager"),)], ids=["eager", "optimizer"])
def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_halved(
    strategies: tuple[Strategy, ...], tmp_path: Path
) -> None:
    plugin = ours()
    weights = weights_of(Fused(fused=True, overflow=True), plugin, tmp_path, *strategies)
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert plugin.scaler.get_scale() == 2.0**9


def test_forward_and_backward_are_captured_and_the_scaler_decides_after_them(tmp_path: Path) -> None:
    expected = weights_of(Fused(fused=True), ours(), tmp_path)[-1]
    module = Fused(fused=True, notes=False)
    torch.testing.assert_close(weights_of(module, ours(), tmp_path, Recorded())[-1], expected)
    facts = module.record.report["recorded"]
    assert facts["replayed_steps"] > 0, facts
    assert (
        "the optimizer runs after each graph: a gradient scaler decides on the host whether to step" in facts["refused"]
    )


@pytest.mark.slow
def test_losses_under_a_scaler_are_eagers(tmp_path: Path) -> None:
    assert train(tmp_path / "eager", "trainer.precision=16-mixed", task="micro").precision == "16-mixed"
    options = {"strategy": "[checkpointing,regional,optimizer]"}
    record: Any = train(tmp_path / "compiled", "trainer.precision=16-mixed", task="micro", **options)
    assert (record.status, record.precision) == ("finished", "16-mixed")
    assert record.matrix_precision == "fp16"
    assert record.report["parity"]["verdict"] == "passed"
    assert max(relative_differences(curve(tmp_path / "compiled"), curve(tmp_path / "eager"))) < 5e-3
