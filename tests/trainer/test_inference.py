"""``run=inference``: batches run forward and timed under every strategy, by the same record as a training."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from strategies import STRATEGIES
from tasks.captioning.model import Captioner
from tests.trainer.inferences import BATCHES, REPEATS, Plain, infer, infer_with
from tests.trainer.runs import MODULE_STRATEGIES, curve, last_checkpoint, train
from trainer.settings import Inference
from trainer.telemetry.record import RunRecord

OF_INFERENCE = sorted(name for name, strategy in STRATEGIES.items() if strategy.training_only is None)
OF_TRAINING = sorted(set(STRATEGIES) - set(OF_INFERENCE))


@pytest.mark.parametrize("strategy", ["eager", *OF_INFERENCE])
def test_every_strategy_leaves_latencies_rates_and_what_compiling_cost(strategy: str, tmp_path: Path) -> None:
    record = infer(tmp_path, "parity=on", strategy=strategy)
    assert (record.status, record.reason, record.run) == ("finished", None, "inference")
    assert (record.steady_steps, record.repeats, record.warmup_steps) == (BATCHES * REPEATS, REPEATS, 2)
    assert record.steady_step_seconds_median is not None
    assert record.steady_step_seconds_p95 is not None
    assert 0 < record.steady_step_seconds_median <= record.steady_step_seconds_p95
    assert len(record.repeat_samples_per_second) == REPEATS
    assert record.repeat_spread is not None
    for name in ("samples_per_second", "useful_tokens_per_second", "padded_share", "teraflops_per_second"):
        assert getattr(record, name) is not None, name
    for name in ("final_loss", "data_wait_share", "joules_per_sample"):
        assert getattr(record, name) is None, name
    assert list(curve(tmp_path, "usage/step_milliseconds_median")) == [6, 10], "a point for each timed run"
    assert RunRecord.load(tmp_path) == record
    if strategy in MODULE_STRATEGIES:
        assert record.regions_compiled == record.regions
        assert record.graphs
        assert record.graph_breaks == 0
        assert record.report["parity"]["verdict"] == "passed"
        assert record.report["slowdown"]["before_the_first_step"]["eager_step_seconds"] > 0
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("strategy", OF_TRAINING)
def test_a_strategy_that_only_concerns_training_is_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^compile\.{strategy}: .*; leave it out of run=inference$"):
        infer(tmp_path, strategy=strategy)


def test_a_batch_runs_in_eval_mode_without_gradients_in_the_runs_precision(tmp_path: Path) -> None:
    module = Plain().train()
    infer_with(module, tmp_path, trainer={"precision": "bf16-mixed"})
    assert len(module.seen) == 2 + BATCHES * REPEATS
    expected = {"rows": 4, "training": False, "gradients": False, "inference_mode": True, "autocast": True}
    assert all(seen == expected for seen in module.seen), "the last, smaller batch is left out"
    assert module.training, "as it was before"


def test_loaders_are_padded_as_in_training(tmp_path: Path) -> None:
    record = infer(tmp_path, "task.data.pad_to=null", strategy="buckets")
    assert record.status == "finished"
    assert any("come from the data being evaluated" in note for note in record.notes)


def test_weights_come_from_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "training")
    weights: list[Tensor] = []
    predict_step = Captioner.predict_step

    def noting(self: Captioner, batch: Any, batch_idx: int) -> Tensor:
        weights.append(self.net.tail.head.weight.detach().clone())
        return predict_step(self, batch, batch_idx)

    monkeypatch.setattr(Captioner, "predict_step", noting)
    record = infer(tmp_path / "inference", f"resume={tmp_path / 'training'}", "task.initialise=device")
    assert record.resumed_from == str(tmp_path / "training" / "checkpoints" / "last.ckpt")
    trained = last_checkpoint(tmp_path / "training")["state_dict"]["net.tail.head.weight"]
    assert all(torch.equal(weight, trained) for weight in weights)
    with pytest.raises(ValueError, match=r"^resume=.*the checkpoint belongs to another model"):
        infer(tmp_path / "other", f"resume={tmp_path / 'training'}", "task.size.vocabulary_size=301")


def test_a_signal_ends_it_after_the_batch_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    predict_step = Captioner.predict_step

    def interrupted(self: Captioner, batch: Any, batch_idx: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            signal.raise_signal(signal.SIGINT)
        return predict_step(self, batch, batch_idx)

    monkeypatch.setattr(Captioner, "predict_step", interrupted)
    record = infer(tmp_path)
    assert (record.status, record.exit_code, record.steady_steps, record.repeats) == ("interrupted", 130, 7, 2)
    assert RunRecord.load(tmp_path) == record


def test_a_module_without_the_step_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^run=inference: LightningModule defines no predict_step and no forward$"):
        infer_with(L.LightningModule(), tmp_path)


def test_bad_values_come_together() -> None:
    with pytest.raises(ValueError, match=r"run\.batches=0 must be at least 1") as refused:
        Inference(batches=0, repeats=0)
    assert len(str(refused.value).splitlines()) == 2


def test_a_record_of_before_there_was_inference_is_read(tmp_path: Path) -> None:
    file = RunRecord(task="old").save(tmp_path)
    values = json.loads(file.read_text())
    for name in ("run", "repeats", "repeat_samples_per_second", "peak_teraflops_measured"):
        del values[name]
    file.write_text(json.dumps(values))
    assert RunRecord.load(file).run == "train"
