"""A training whose loss is NaN or infinite ends at that step, keeps its last finite checkpoint and names both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from strategies import Regional
from tasks.lightning_module import ScoredModule
from tests.processes import Pair
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import Recorded
from tests.trainer.runs import last_checkpoint, train
from trainer.callback import Compile
from trainer.checkpoints import Checkpoints, FiniteLosses, NonFiniteLoss
from trainer.process import StopRequest
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")

training_step = ScoredModule.training_step


def spoil(monkeypatch: pytest.MonkeyPatch, step: int, value: float, *, only: bool = False) -> None:
    """The loss is ``value`` from optimizer step ``step`` on, or in that one alone."""

    def spoilt(module: ScoredModule, batch: Any, batch_idx: int) -> Tensor:
        loss = training_step(module, batch, batch_idx)
        now = module.global_step + 1
        return loss * value if now == step or (now > step and not only) else loss

    monkeypatch.setattr(ScoredModule, "training_step", spoilt)


@pytest.mark.parametrize(
    ("value", "every", "changes"),
    [
        (float("nan"), 1, ("trainer.checkpoint_every_n_steps=2",)),
        (float("inf"), 1000, ("trainer.checkpoint_every_n_steps=2",)),  # found where the next checkpoint is due
        (float("nan"), 1000, ("trainer.checkpoint_every_n_steps=null",)),  # found at the end
    ],
)
def test_the_run_ends_with_the_step_named_and_the_last_finite_checkpoint_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, every: int, changes: tuple[str, ...]
) -> None:
    spoil(monkeypatch, 4, value)
    record = train(tmp_path, "trainer.max_steps=9", f"trainer.log_every_n_steps={every}", *changes)
    assert (record.status, record.exit_code) == ("failed", 1)
    reason = str(record.reason)
    assert reason.startswith("NonFiniteLoss: step 4 (epoch 0, batch_idx 3, learning rate ")
    assert f"the loss is {value}. " in reason
    if "trainer.checkpoint_every_n_steps=2" in changes:
        assert f"Last finite checkpoint: {tmp_path / 'checkpoints' / 'last.ckpt'} (step 2)" in reason
        saved = last_checkpoint(tmp_path)
        assert saved["global_step"] == 2
        assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())
        assert record.steps == 4
    else:
        assert "Last finite checkpoint: none was written" in reason
        assert not (tmp_path / "checkpoints").exists()
    assert_json_without_nan(tmp_path)


def assert_json_without_nan(run_dir: Path) -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} in record.json")

    json.loads((run_dir / "record.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("only", [True, False])
def test_the_option_continues_as_eager_does_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: bool
) -> None:
    spoil(monkeypatch, 2, float("nan"), only=only)
    with pytest.warns(UserWarning, match="on_nonfinite_loss=warn: the run continues after step 2") as warned:
        record = train(tmp_path, "on_nonfinite_loss=warn", "trainer.checkpoint_every_n_steps=1")
    assert len([one for one in warned if "on_nonfinite_loss" in str(one.message)]) == 1
    assert (record.status, record.steps, record.final_loss) == ("finished", 4, None)
    assert len([note for note in record.notes if "on_nonfinite_loss" in note]) == 1
    assert last_checkpoint(tmp_path)["global_step"] == 4
    assert_json_without_nan(tmp_path)
    assert RunRecord.load(tmp_path).final_loss is None


def test_weights_that_the_last_update_spoilt_are_not_saved_although_no_loss_has_shown_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's loss comes before its update: that of step 3 is finite, the weights after it are not."""
    after: list[int] = []

    def on_before_optimizer_step(module: ScoredModule, optimizer: Any) -> None:
        after.append(1)
        if len(after) == 3:
            next(module.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    monkeypatch.setattr(ScoredModule, "on_before_optimizer_step", on_before_optimizer_step)
    record = train(tmp_path, "trainer.checkpoint_every_n_steps=1", "trainer.gradient_clip_val=null")
    assert record.status == "failed"
    assert "step 3 (epoch 0, batch_idx 2, " in str(record.reason)
    assert "weights are not finite after it" in str(record.reason)
    assert last_checkpoint(tmp_path)["global_step"] == 2


def watched(module: L.LightningModule, folder: Path, strategies: list[Any], **options: Any) -> Compile:
    """Train ``module`` of somebody else's under the rule."""
    compile_ = Compile(strategies, parity="off")
    losses = FiniteLosses("fail", compile_)
    checkpoints = Checkpoints(folder, every_n_steps=None, stop=StopRequest(print), losses=losses)
    fit(module, folder, [compile_, checkpoints], **options)
    return compile_


class Diverging(Blocks):
    """The weights grow until the loss is infinite, by themselves: no Python of a replay has to run for that."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e12)


@pytest.mark.parametrize("strategy", [Regional(backend="aot_eager"), Recorded()], ids=["compiled", "captured"])
def test_the_rule_is_eagers_for_compiled_and_replayed_steps(strategy: Any, tmp_path: Path) -> None:
    said = []
    for strategies in ([], [strategy]):
        with pytest.raises(NonFiniteLoss) as ended:
            watched(Diverging(), tmp_path, strategies, max_steps=12, max_epochs=-1)
        said.append(str(ended.value).split("Last finite")[0])
    assert said[0] == said[1]
    assert said[0].startswith("step ")


class Infinite(Blocks):
    """Gradients that a scaler finds infinite in the second step; its loss is finite."""

    def on_after_backward(self) -> None:
        if self.global_step == 1:
            next(self.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]


class Skipping(MixedPrecision):
    """float16 on a CPU, where torch's scaler works as on a GPU."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[assignment]


def test_a_step_that_a_gradient_scaler_leaves_out_is_no_fault(tmp_path: Path) -> None:
    plugin = Skipping()
    compile_ = watched(Infinite(), tmp_path, [], max_steps=4, plugins=[plugin])
    assert compile_.record.steps == 4
    assert plugin.scaler.get_scale() < 2.0, "it left a step out"


def test_a_loss_of_double_precision_beyond_single_precision_is_finite(tmp_path: Path) -> None:
    class Large(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).double() + 1e39

    assert watched(Large(), tmp_path, [], max_steps=2).record.status == "finished"


def spoilt_on_one(folder: Path) -> list[Any]:
    rank = os.environ["RANK"]

    def on_a_rank(module: ScoredModule, batch: Any, batch_idx: int) -> Tensor:
        loss = training_step(module, batch, batch_idx)
        if rank == "1" and module.global_step == 2:
            loss = loss + (float("nan") - loss).detach()  # its gradients are finite: no other process ever sees it
        return loss

    ScoredModule.training_step = on_a_rank  # type: ignore[method-assign]
    record = train(folder / "run", "trainer.devices=2", "trainer.max_steps=6", "trainer.checkpoint_every_n_steps=1")
    return [record.status, record.reason, record.steps]


def test_all_processes_end_at_the_same_step_when_one_of_them_saw_it(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(spoilt_on_one, tmp_path)
    assert one == other
    assert one[0] == "failed"
    assert "step 3 (epoch 0, batch_idx 2, " in one[1]
    assert last_checkpoint(tmp_path / "run")["global_step"] == 2
