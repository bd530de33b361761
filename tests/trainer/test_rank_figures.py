"""Several processes: what each of them measured reaches the first one, and which of them is slow is found."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from tests.processes import Pair
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.runs import events_of
from trainer.callback import Compile
from trainer.console import communication_line
from trainer.telemetry.record import RankFigures, Rates, RunRecord, communication_of
from trainer.telemetry.telemetry import added_up
from trainer.telemetry.tensorboard import rank_figures

SLOW, SLEPT_SECONDS = 1, 0.15


class SlowOnOne(Blocks):
    """A rank that computes longer than the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == SLOW:
            time.sleep(SLEPT_SECONDS)
        return super().training_step(batch, batch_idx)


def train_with_a_slow_rank(folder: Path) -> RunRecord:
    compile_ = Compile(warmup_steps=2, profile="on", verbose=False)
    options = {"devices": 2, "strategy": "ddp", "max_steps": 12, "max_epochs": -1}
    logger = TensorBoardLogger(folder, name="", version="")
    fit(SlowOnOne(), folder, [compile_], logger=logger, **options)
    return compile_.record


@pytest.mark.xdist_group("two_processes")
def test_the_rank_that_the_other_waits_for_is_named(pair: Pair, tmp_path: Path) -> None:
    record, other = pair(train_with_a_slow_rank, tmp_path)
    assert [one.rank for one in record.ranks] == [0, 1]
    assert all(one.steady_step_seconds_median and one.peak_process_memory_gib for one in record.ranks)
    assert not other.ranks, "the first process keeps the record"
    found = communication_of(record.ranks)
    assert found.slowest.rank == SLOW
    assert found.skew_seconds > SLEPT_SECONDS / 2
    assert f"rank {SLOW} (" in communication_line(record.ranks)
    assert record.peak_process_memory_gib == max(one.peak_process_memory_gib for one in record.ranks)
    assert record.report["profile"]["exposed_communication_share"] > 0.3, "what the first one waits in the profile"
    assert RunRecord.load(tmp_path).ranks == record.ranks
    scalars = events_of(tmp_path)
    assert [event.value for event in scalars.Scalars("ranks/slowest")] == [SLOW]
    (skew,) = scalars.Scalars("ranks/skew_milliseconds")
    assert skew.value == pytest.approx(found.skew_seconds * 1e3)


def rank(number: int, exposed: float | None = None, step: float | None = 0.1) -> RankFigures:
    return RankFigures(
        rank=number,
        host="here",
        device="a GPU",
        steady_step_seconds_median=step,
        exposed_communication_seconds=exposed,
        peak_device_memory_gib=number + 1.0,
    )


def test_the_slowest_rank_waits_least_and_what_it_waits_is_communication() -> None:
    found = communication_of([rank(0, 0.03), rank(1, 0.01), rank(2, 0.02)])
    assert (found.slowest.rank, found.skew_seconds) == (1, pytest.approx(0.02))
    assert found.exposed_share == pytest.approx(0.1)
    line = communication_line([rank(0, 0.03), rank(1, 0.01)])
    assert line.startswith("10.0% of a step is not hidden")
    assert "rank 1 (here, a GPU) is the slowest: another waits 20 ms of each step for it (20%)" in line
    assert communication_line([rank(0, 0.011), rank(1, 0.01)]) == "10.0% of a step is not hidden by compute"


@pytest.mark.parametrize("known", [[], [rank(0, 0.1)], [rank(0, 0.1), rank(1)]])
def test_nothing_is_said_of_ranks_of_which_not_all_measured(known: list[RankFigures]) -> None:
    assert communication_of(known) is None
    assert communication_line(known) == ""
    assert rank_figures(known)["ranks/skew_milliseconds"] is None
    assert rank_figures([rank(0), rank(2)])["ranks/peak_device_gib"] == 3.0


def test_rates_are_added_up_where_all_have_them() -> None:
    mine = Rates(samples_per_second=1.5, padded_share=0.1)
    everywhere = [mine, Rates(samples_per_second=1.0, tokens_per_second=2.0)]
    assert added_up(mine, everywhere) == Rates(samples_per_second=2.5, padded_share=0.1)
