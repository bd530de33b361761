"""Captured steps of two processes: what one process with the whole batch trains, captured alike or not at all."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Program, Strategy
from strategies.base import Stage
from strategies.cuda_graph.capture import StepGraphs
from tests.processes import Pair
from tests.trainer.lightning_modules import Losses
from tests.trainer.recording import RecordingEngine
from trainer.callback import Compile

pytestmark = [pytest.mark.xdist_group("two_processes"), pytest.mark.timeout(180)]
STEPS = 24


class Recorded(Strategy):
    """``cuda_graph`` with an engine that works on a CPU."""

    name: ClassVar[str] = "recorded"
    stage: ClassVar[Stage] = Stage.STEP

    def begin(self, program: Program) -> None:
        program.step = StepGraphs(RecordingEngine(program.module), eager_steps=1, max_graphs=8)

    def end(self, program: Program) -> None:
        if program.step is not None:
            program.report[self.name] = program.step.facts()
            program.step = None


class Net(L.LightningModule):
    """Two layers; logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        loss = nn.functional.mse_loss(self.net(x_BD), target_B1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def train(strategies: list[Any], **options: Any) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    L.seed_everything(0, verbose=False)
    module, losses = Net(), Losses()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    world = options.get("devices", 1)
    compile_ = Compile(strategies, parity="strict", measure_peak=False, save=False, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[compile_, losses], **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8 // world))
    facts = compile_.record.report.get("recorded", {})
    return losses.values, facts, [parameter.detach() for parameter in module.parameters()]


def captured(strategy: str, accumulate: int) -> Any:
    options = {"devices": 2, "strategy": strategy, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    return train([], **options), train([Recorded()], **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_steps_are_the_uncaptured_ones(pair: Pair, accumulate: int) -> None:
    for plain, (losses, facts, weights) in pair(captured, "ddp", accumulate):
        assert facts["replayed_steps"] >= 8, facts
        assert losses == pytest.approx(plain[0], abs=1e-6)
        for one, other in zip(weights, plain[2], strict=True):
            torch.testing.assert_close(one, other)
