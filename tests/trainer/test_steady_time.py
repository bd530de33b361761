"""The ruler: what belongs to no step stays out of the steps, and no step waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tasks.lightning_module import ScoredModule
from tests.trainer.clock import CLOCK, Clock
from tests.trainer.lightning_modules import Blocks, fit, quiet_trainer
from tests.trainer.runs import train
from trainer.callback import Compile
from trainer.console import summary
from trainer.telemetry.record import RunRecord

SECONDS = 0.4
DATA = str(Path("tasks") / "images.py")


def test_validation_and_checkpoints_are_not_in_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    save = L.Trainer.save_checkpoint

    def slow_save(*arguments: Any, **named: Any) -> None:
        save(*arguments, **named)
        clock.sleep(SECONDS)

    monkeypatch.setattr(ScoredModule, "on_validation_epoch_start", lambda module: clock.sleep(SECONDS))
    monkeypatch.setattr(L.Trainer, "save_checkpoint", slow_save)
    record = train(tmp_path, "trainer.max_steps=8", "trainer.val_every_n_steps=3", "trainer.checkpoint_every_n_steps=4")
    assert record.status == "finished"
    assert record.steady_steps == 7
    # Two validations and a checkpoint in the middle of training, two at its end.
    assert record.pause_seconds == pytest.approx(5 * SECONDS)
    assert record.first_step_seconds == record.steady_step_seconds_p95 == 0


class PlansForEachLength(Blocks):
    """As cuDNN's attention does: once for each length, three times as long as the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        CLOCK.sleep(0.1 if len(batch[0]) in self.planned else 0.4)
        self.planned.add(len(batch[0]))
        return super().training_step(batch, batch_idx)


def test_eager_is_not_measured_by_the_lengths_that_it_meets_for_the_first_time(tmp_path: Path, clock: Clock) -> None:
    lengths = [3, 5, 3, 4, 6, 3, 4, 9, 5, 7, 3, 4, 8, 6, 9, 2, 9]
    loader = [(torch.randn(length, 8), torch.randn(length, 1)) for length in lengths]
    compile_ = Compile(warmup_steps=2)
    trainer = quiet_trainer(callbacks=[compile_], default_root_dir=tmp_path, max_epochs=1, log_every_n_steps=3)
    trainer.fit(PlansForEachLength(), DataLoader(loader, batch_size=None))
    record = compile_.record
    assert (record.steady_steps, record.new_shape_steps, record.warmup_steps) == (9, 6, 8)
    assert (record.steady_step_seconds_mean, record.steady_step_seconds_p95) == pytest.approx((0.1, 0.1))
    assert record.warmup_seconds == pytest.approx(8 * 0.4)
    assert record.new_shape_seconds == pytest.approx(6 * (0.4 - 0.1))
    assert summary(record)["new shapes"] == "6 steps took 1.8 s beyond steady ones; padding to few shapes may save that"


class SavesInsideASlowStep(L.Callback):
    """Two batches make a step; each takes a tenth of a second, and between them a checkpoint is written."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "inside.ckpt")


def test_a_pause_inside_an_accumulation_does_not_shorten_its_step(tmp_path: Path, clock: Clock) -> None:
    compile_ = Compile(warmup_steps=1)
    callbacks = [compile_, SavesInsideASlowStep()]
    fit(Blocks(), tmp_path, callbacks, accumulate_grad_batches=2, max_steps=3)
    assert compile_.record.steady_steps == 2
    assert compile_.record.steady_step_seconds_mean == pytest.approx(2 * 0.1)


def test_slow_compiles_are_not_in_the_steady_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    @torch._dynamo.register_backend(name="tests_an_hour_a_graph")  # type: ignore[untyped-decorator]
    def compiles_slowly(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        clock.sleep(3600)
        return graph.forward

    monkeypatch.setattr(ScoredModule, "on_train_batch_start", lambda *_, **__: clock.sleep(SECONDS))
    changes = ("trainer.max_steps=8", "trainer.val_every_n_steps=5", "parity=off")
    record = train(tmp_path, *changes, strategy="regional", backend="tests_an_hour_a_graph")
    assert record.steady_steps == 7, "what validation compiles is no step's"
    assert record.steady_step_seconds_p95 == pytest.approx(SECONDS)
    assert record.warmup_seconds >= 3600


@pytest.fixture
def synchronisations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str]]:
    """Each call that would wait for a device, with the optimizer steps done when it came."""
    found: list[tuple[int | None, str]] = []
    progress: dict[str, int | None] = {"step": None}

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            # Tensors of the loader never leave the host.
            if not sys._getframe(1).f_code.co_filename.endswith(DATA):
                found.append((progress["step"], name))
            return original(tensor, *arguments, **named)

        return call

    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, watched(name))

    def on_train_batch_start(module: ScoredModule, batch: Any, batch_idx: int) -> None:
        progress["step"] = module.trainer.global_step

    monkeypatch.setattr(ScoredModule, "on_train_batch_start", on_train_batch_start)
    return found


@pytest.mark.slow
def test_no_step_between_two_points_reads_from_the_device(
    tmp_path: Path, synchronisations: list[tuple[int | None, str]]
) -> None:
    changes = ("trainer.max_steps=40", "trainer.log_every_n_steps=20", "task.data.train_images=200")
    record = train(tmp_path, *changes, "parity=off", strategy="regional")  # an audited step is read, apart from it
    assert record.status == "finished"
    assert any(name == "tolist" for _, name in synchronisations), "the losses are read at each point"
    # After the first steps (compilation) and up to the flush in step 20; then up to the last step.
    between = [(step, name) for step, name in synchronisations if step in {*range(3, 19), *range(20, 39)}]
    assert between == []


# ---- the time lost to the data loader --------------------------------------------------------------------------------


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


def test_a_slow_loader_shows_as_the_share_of_the_steps_that_it_takes(tmp_path: Path, clock: Clock) -> None:
    record = record_of(tmp_path, 0.01)
    # Two examples of 10 ms each, a step of 10 ms.
    assert record.data_wait_share == pytest.approx(2 / 3)
    assert summary(record)["waiting for data"] == f"the loop waits for data {record.data_wait_share:.0%} of the time"


def test_fetches_around_a_pause_belong_to_no_step(tmp_path: Path, clock: Clock) -> None:
    # Validated after each step: every batch is fetched between a validation and the beginning of its lap.
    record = record_of(tmp_path, 0.01, val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=0)
    assert record.data_wait_share is None


@pytest.mark.parametrize("task", [{"data": {"num_workers": None}}, {"data": {}}, {"data": None}, {}])
def test_who_waits_is_named_and_advice_is_of_an_option_that_the_task_has(task: dict[str, Any]) -> None:
    record = RunRecord(task="any", device_type="cuda", data_wait_share=0.12, config={"task": task})
    advice = ": more task.data.num_workers?" if task.get("data") else ""
    assert summary(record)["waiting for data"] == f"the GPU waits for data 12% of the time{advice}"
