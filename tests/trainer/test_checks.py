"""Checks of a training: the first call of each kind, audits of later steps, and what a difference leads to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from strategies import Regional, Strategy
from tests.strategies import backends
from tests.strategies.backends import Fault
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile, ParityError
from trainer.guards import checks
from trainer.telemetry.record import RunRecord


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    Fault.clear()
    yield
    Fault.clear()


class FromStep(L.Callback):
    """Sets the backend's fault when step ``first`` begins, and takes it back after step ``last``."""

    def __init__(self, first: int, last: int = 1000, **fault: float) -> None:
        self._first, self._last, self._fault = first, last, fault

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step + 1
        for name, factor in self._fault.items():
            setattr(Fault, name, factor if self._first <= step <= self._last else 1.0)


def faulty(**changes: Any) -> Regional:
    return Regional(backend=backends.FAULTY, **changes)


def trained(
    folder: Path,
    *callbacks: L.Callback,
    module: L.LightningModule | None = None,
    strategies: list[Strategy] | None = None,
    steps: int = 12,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], RunRecord]:
    compile_ = Compile(strategies or [faulty()], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = fit(module or Blocks(), folder, [*callbacks, compile_], max_steps=steps, **(trainer or {}))
    return losses, compile_.record


@pytest.fixture
def eager(tmp_path: Path) -> list[float]:
    return fit(Blocks(), tmp_path, [], max_steps=12)


def test_audits_come_at_steps_2_4_8_and_at_the_last(tmp_path: Path, eager: list[float]) -> None:
    losses, record = trained(tmp_path)
    assert losses == pytest.approx(eager, rel=FLOOR)
    assert (record.audits.verdict, record.audits.reason) == ("clean", None)
    assert record.audits.steps == [2, 4, 8, 12]
    assert record.audits.last_clean_step == 12
    assert {"output", "gradient"} <= record.audits.worst.keys()
    assert all(one.difference <= one.tolerance for one in record.audits.worst.values())
    assert record.eager_parts == {}


def test_one_kind_of_region_is_audited_a_step(tmp_path: Path) -> None:
    _, record = trained(tmp_path, strategies=[faulty(parts=["head"])])
    assert record.audits.steps == [2, 3, 4, 5, 8, 9, 11, 12]
    assert record.report["parity"]["checks"] == 2


class TwoShapes(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([one[:2] if self.global_step % 2 else one for one in batch], batch_idx)


class FromStepInOneShape(FromStep):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        Fault.clear()
        if trainer.global_step % 2:
            super().on_train_batch_start(trainer)


def test_a_clean_audit_of_another_shape_says_nothing_of_the_one_that_differs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 60, "trainer": {"max_epochs": -1}}
    _, record = trained(tmp_path, FromStepInOneShape(6, backward=1.01), module=TwoShapes(), **options)
    audits = record.audits
    assert audits.verdict == "went eager"
    assert any(step > 6 and step % 2 for step in audits.steps), "the other shape was looked at, too"
    assert (audits.last_clean_step or 0) < 6, audits.reason


def test_the_last_good_checkpoint_is_named(tmp_path: Path) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    _, record = trained(tmp_path, FromStep(5, backward=1.01), saved, steps=16, trainer={"enable_checkpointing": True})
    clean = record.audits.last_clean_step
    assert f"Last good checkpoint: {tmp_path}/kept/step={clean}.ckpt (step {clean})" in record.audits.reason


def test_a_step_after_a_checkpoint_is_audited_where_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=5, save_top_k=-1)
    asked: dict[float, list[int]] = {}
    for share in (1e9, 0.0):
        monkeypatch.setattr(checks, "SHARE", share)
        _, record = trained(tmp_path, saved, steps=20, trainer={"enable_checkpointing": True})
        asked[share] = record.audits.steps
    assert asked == {1e9: [2, 4, 6, 8, 11, 16, 20], 0.0: [2, 4, 8, 16, 20]}


@pytest.mark.parametrize(("share", "micro_batches", "rounds"), [(1e9, 1, 8), (0.0, 1, 7), (0.0, 2, 7)])
def test_from_step_64_on_audits_wait_for_their_share_of_the_time(
    share: float, micro_batches: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SHARE", share)
    options = {"max_epochs": -1, "accumulate_grad_batches": micro_batches}
    _, record = trained(tmp_path, steps=140, trainer=options)
    assert len(record.audits.steps) == rounds, "at 2, 4, 8, 16, 32, 64, perhaps 128, and 140, or soon after"
    assert record.audits.last_clean_step == 140


class Validated(Blocks):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader([(torch.ones(8), torch.ones(1))] * 4, batch_size=4)


class InEvaluation(L.Callback):
    """Its fault is one of evaluations alone, from step ``first`` on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        Fault.forward = 1.01 if trainer.global_step >= self._first else 1.0

    def on_validation_end(self, *_: Any) -> None:
        Fault.forward = 1.0


def evaluated(folder: Path, first: int, **options: Any) -> tuple[list[float], RunRecord]:
    return trained(
        folder, InEvaluation(first), module=Validated(), steps=16,
        trainer={"val_check_interval": 1, "num_sanity_val_steps": 0}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("first", [1, 6])
def test_evaluations_that_are_not_eagers_run_eager_and_the_training_compiled(first: int, tmp_path: Path) -> None:
    _, record = evaluated(tmp_path, first)
    assert record.eager_parts == {}
    assert record.regions_compiled == 3
    assert list(record.eager_evaluations) == ["layers.0", "layers.1", "layers.2"]
    assert record.report["parity"]["verdict"] == "failed"
    assert "layers.2 run eager in evaluations: it is not eager's: output" in record.report["parity"]["reason"]
    assert record.audits.verdict == ("clean" if first == 1 else "went eager")
    assert [event.kind for event in record.events if "in evaluations" in event.reason] == ["fallback"]
    assert len([note for note in record.notes if "layers.2 run eager in evaluations" in note]) == 1


def test_on_difference_fail_ends_the_run_at_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"^on_difference=\"fail\": Block: layers\.0.* eager in evaluations: "):
        evaluated(tmp_path, 1, on_difference="fail")
