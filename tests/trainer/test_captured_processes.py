"""Captured steps of two processes: what one process with the whole batch trains, captured alike or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Program, Strategy
from strategies.base import Stage
from strategies.cuda_graph.capture import StepGraphs
from strategies.cuda_graph.steps import Unused, Used
from tests.processes import Pair
from tests.trainer.lightning_modules import Losses
from tests.trainer.recording import RecordingEngine
from trainer.callback import Compile
from trainer.loops.fsdp2 import FSDP2

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
    """Two layers; logs its loss, which batches may weigh by their index."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        loss = nn.functional.mse_loss(self.net(x_BD), target_B1)
        if self.weight:
            loss = loss * (1 + self.weight * batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def train(
    strategies: list[Any], weight: float = 0.0, **options: Any
) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    L.seed_everything(0, verbose=False)
    module, losses = Net(weight), Losses()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    world = options.get("devices", 1)
    if options.get("strategy") == "fsdp2":
        options["strategy"] = FSDP2()
    compile_ = Compile(strategies, parity="strict", measure_peak=False, save=False, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[compile_, losses], **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8 // world))
    facts = compile_.record.report.get("recorded", {})
    return losses.values, facts, [parameter.detach() for parameter in module.parameters()]


def captured(strategy: str, accumulate: int, weight: float = 0.0) -> Any:
    options = {"devices": 2, "strategy": strategy, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    return train([], weight, **options), train([Recorded()], weight, **options)


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp2", 1)])
def test_captured_steps_are_the_uncaptured_ones(pair: Pair, strategy: str, accumulate: int) -> None:
    for plain, (losses, facts, weights) in pair(captured, strategy, accumulate):
        assert facts["replayed_steps"] >= 8, facts
        assert losses == pytest.approx(plain[0], abs=1e-6)
        for one, other in zip(weights, plain[2], strict=True):
            torch.testing.assert_close(one, other)


def test_an_index_that_the_step_uses_counts_as_used(pair: Pair) -> None:
    for plain, (losses, facts, _) in pair(captured, "fsdp2", 1, 0.01):
        assert "batch_idx" in str(facts["refused"]), facts
        assert losses == pytest.approx(plain[0], abs=1e-6)


@pytest.mark.parametrize("question", [dataclasses.is_dataclass, bool, lambda one: isinstance(one, int)])
def test_a_question_that_is_not_torchs_is_a_use(question: Any) -> None:
    with pytest.raises(Used):
        question(Unused())
