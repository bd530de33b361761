"""A loop without Lightning behind the same protocol: strategies compile and capture in it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Optimizer, Regional, Strategy
from tests.strategies import backends
from tests.trainer.recording import Recorded
from trainer.loops.compiled_training import CompiledTraining
from trainer.loops.plain import PlainLoop
from trainer.telemetry.record import RunRecord


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        for block in self.blocks:
            x_BD = block(x_BD)
        return nn.functional.mse_loss(self.head(x_BD), target_B1)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]


def train(
    strategies: list[Strategy], *, micro_batches: int = 1, steps: int = 6, **options: Any
) -> tuple[list[float], RunRecord]:
    """Losses of a training under ``strategies``, and its record."""
    module, record = Net(), RunRecord(task="", label="")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    loop = PlainLoop(module, optimizer, schedule=schedule, micro_batches=micro_batches, clip=1.0, max_steps=steps)
    training = CompiledTraining(strategies, warmup_steps=1, measure_peak=False, record=record, **options)
    training.apply_to(module, device=loop.device, precision=loop.precision)
    training.begin(loop)
    fitted = loop.fit(batches(steps * micro_batches), training)
    losses = [float(loss) for loss in fitted if loss is not None]
    training.finish()
    training.close()
    assert loop.steps_done == steps
    return losses, record


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_are_captured_in_a_plain_loop(micro_batches: int) -> None:
    expected, _ = train([], micro_batches=micro_batches, steps=12)
    losses, record = train([Recorded()], micro_batches=micro_batches, steps=12)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert record.report["recorded"]["replayed_steps"] > 0
    assert not record.eager_parts


def test_blocks_and_optimizer_are_compiled_in_a_plain_loop() -> None:
    backends.graphs.clear()
    expected, _ = train([])
    strategies: list[Strategy] = [Regional(backend=backends.COUNTING), Optimizer(backend="aot_eager")]
    losses, record = train(strategies)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert len(backends.graphs) == 2, "one for the first block, whose input needs no gradient, and one for the others"
    assert (record.regions_compiled, record.eager_parts) == (3, {})


def test_a_loop_stays_taken_over_where_nobody_keeps_what_gives_it_back() -> None:
    module, taken = Net(), []
    loop = PlainLoop(module, torch.optim.SGD(module.parameters(), lr=0.1), max_steps=3)

    def run(micro: Any) -> dict[str, Any]:
        taken.append(micro.index)
        return micro.run(micro.batch)

    loop.wrap_step(run)
    assert len(list(loop.fit(batches(3)))) == 3
    assert taken == [0, 1, 2]


def test_a_plain_loop_is_compiled_guarded_and_measured_as_a_whole(tmp_path: Path) -> None:
    record = RunRecord(task="", label="regional")
    training = CompiledTraining([Regional(backend="aot_eager")], warmup_steps=1, measure_peak=False, record=record)
    module = Net()
    loop = PlainLoop(module, torch.optim.SGD(module.parameters(), lr=0.1), max_steps=12, directory=str(tmp_path))
    training.apply_to(module, device=loop.device, precision=loop.precision)
    training.begin(loop)
    losses = [float(loss) for loss in loop.fit(batches(5), training) if loss is not None]
    training.finish()
    training.close()
    assert losses[0] == pytest.approx(train([], steps=1)[0][0])
    assert record.steps == len(losses) == 12
    assert record.report["parity"]["verdict"] == "passed"
    assert record.audits is not None
    assert record.audits.verdict == "clean"
    assert record.regions_compiled == 3
    assert record.steady_steps
    assert record.final_loss is not None
