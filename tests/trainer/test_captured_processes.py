"""Captured steps of two processes: what one process with the whole batch trains, captured alike or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.processes import Pair
from tests.trainer.capturing import Captured
from tests.trainer.lightning_modules import Losses, quiet_trainer
from tests.trainer.recording import Recorded
from trainer.loops.fsdp2 import FSDP2

pytestmark = pytest.mark.xdist_group("two_processes")
STEPS = 20


class Net(L.LightningModule):
    """Two layers; logs its loss. ``habit``: what makes steps hard to capture."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit = habit
        self.side = nn.Linear(8, 1)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        loss = nn.functional.mse_loss(self.net(x_BD), target_B1)
        if self.habit != "a weight without gradient" or len(x_BD) == 4:
            loss = loss + self.side(x_BD).square().mean()
        if self.habit == "its index":
            loss = loss * (1 + 0.01 * batch_idx)
        if self.habit == "reads a number" and len(x_BD) == 2:
            loss = loss * (1 + 0.1 * float(x_BD.mean()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Shapes(IterableDataset[Any]):
    """Batches of two and of four rows, of as many in both processes: while one captures, the engine communicates."""

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ.get("RANK", "0"))
        generator = torch.Generator().manual_seed(rank)
        for number in range(4 * STEPS):
            rows = 2 if number * 3 % 7 < 3 else 4
            yield torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


def train(strategies: list[Any], habit: str = "", **options: Any) -> tuple[list[float], dict[str, Any], list[Tensor]]:
    L.seed_everything(0, verbose=False)
    module, losses = Net(habit), Losses()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    world = options.get("devices", 1)
    if options.get("strategy") == "fsdp2":
        options["strategy"] = FSDP2()
    captured = Captured(strategies) if strategies else None
    trainer = quiet_trainer(
        max_steps=STEPS, max_epochs=-1, callbacks=[losses, *([captured] if captured else [])], **options
    )
    shapes: Any = DataLoader(Shapes(), batch_size=None)
    trainer.fit(module, shapes if habit else DataLoader(data, batch_size=8 // world))
    facts = captured.facts if captured else {}
    return losses.values, facts, [parameter.detach() for parameter in module.parameters()]


Case = tuple[str, int, str]
"""Lightning's strategy, micro-batches of a step, habit."""


def captured(cases: list[Case]) -> list[Any]:
    """On two ranks: each case without capture and with it."""
    both = []
    for strategy, accumulate, habit in cases:
        options = {
            "devices": 2,
            "strategy": strategy,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": 0.5,
        }
        both.append((train([], habit, **options), train([Recorded()], habit, **options)))
    return both


def assert_alike(plain: Any, with_graphs: Any) -> None:
    losses, facts, weights = with_graphs
    assert losses == pytest.approx(plain[0], abs=1e-6), facts
    for one, other in zip(weights, plain[2], strict=True):
        torch.testing.assert_close(one, other)


def test_captured_steps_are_the_uncaptured_ones(pair: Pair, subtests: pytest.Subtests) -> None:
    cases = [("ddp", 1, ""), ("ddp", 2, ""), ("fsdp2", 1, ""), ("fsdp2", 3, "")]
    for rank, trainings in enumerate(pair(captured, cases)):
        for case, (plain, with_graphs) in zip(cases, trainings, strict=True):
            with subtests.test(rank=rank, case=case):
                assert with_graphs[1]["replayed_steps"] >= 8, with_graphs[1]
                assert_alike(plain, with_graphs)


REFUSED = {
    "two shapes": "",
    "its index": "batch_idx",
    "reads a number": "operation not permitted when stream is capturing",
    "a weight without gradient": "not every weight has a gradient in each micro-batch",
}
"""What is said of a habit."""


def test_steps_that_are_captured_in_part_or_not_at_all_lose_no_gradient(pair: Pair, subtests: pytest.Subtests) -> None:
    # Each habit with one micro-batch or with three; a missing gradient with both: one is refused, one is not.
    one, three = (
        ["two shapes", "reads a number", "a weight without gradient"],
        ["its index", "a weight without gradient"],
    )
    cases = [("fsdp2", accumulate, habit) for accumulate, habits in ((1, one), (3, three)) for habit in habits]
    assert {habit for *_, habit in cases} == REFUSED.keys()
    for rank, trainings in enumerate(pair(captured, cases)):
        for case, (plain, with_graphs) in zip(cases, trainings, strict=True):
            with subtests.test(rank=rank, case=case):
                _, accumulate, habit = case
                if accumulate > 1 or habit != "a weight without gradient":
                    assert REFUSED[habit] in str(with_graphs[1]["refused"]), with_graphs[1]
                assert_alike(plain, with_graphs)
