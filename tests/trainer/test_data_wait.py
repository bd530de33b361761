"""The time lost to the data loader: within the steady steps, not in pauses, said plainly where it is much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.trainer.clock import CLOCK
from tests.trainer.lightning_modules import Blocks, quiet_trainer
from trainer.callback import Compile
from trainer.console import summary
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.usefixtures("clock")


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Takes some seconds for each example."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        CLOCK.sleep(self._seconds)
        return torch.randn(8), torch.randn(1)


class Working(Blocks):
    """A step that takes ten milliseconds."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        CLOCK.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        CLOCK.sleep(0.2)


def record_of(folder: Path, seconds: float, **options: object) -> RunRecord:
    record = RunRecord(task="working")
    trainer = quiet_trainer(
        callbacks=[Compile(record=record, warmup_steps=1, count=lambda batch: (len(batch[0]), None, None, None))],
        default_root_dir=folder,
        max_steps=12,
        **options,
    )
    loader = DataLoader(Slow(seconds), batch_size=2)
    trainer.fit(Working(), loader, loader if options else None)
    assert not {"_on_before_fetch", "_on_after_fetch"} & set(vars(trainer.fit_loop.epoch_loop))
    return record


def test_a_slow_loader_shows_as_the_share_of_the_steps_that_it_takes(tmp_path: Path) -> None:
    record = record_of(tmp_path, 0.01)
    # Two examples of 10 ms each, a step of 10 ms.
    assert record.data_wait_share == pytest.approx(2 / 3)
    assert summary(record)["waiting for data"] == f"the loop waits for data {record.data_wait_share:.0%} of the time"


def test_fetches_around_a_pause_belong_to_no_step(tmp_path: Path) -> None:
    # Validated after each step: every batch is fetched between a validation and the beginning of its lap.
    record = record_of(tmp_path, 0.01, val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=0)
    assert record.data_wait_share is None


@pytest.mark.parametrize("task", [{"data": {"num_workers": None}}, {"data": {}}, {"data": None}, {}])
def test_who_waits_is_named_and_advice_is_of_an_option_that_the_task_has(task: dict[str, Any]) -> None:
    record = RunRecord(task="any", device_type="cuda", data_wait_share=0.12, config={"task": task})
    advice = ": more task.data.num_workers?" if task.get("data") else ""
    assert summary(record)["waiting for data"] == f"the GPU waits for data 12% of the time{advice}"
