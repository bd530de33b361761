"""Audits: a step that stops being eager's is found while it trains, named, and never saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.trainer import guarded
from tests.trainer.audited import (
    FAULT,
    LONG,
    Captured,
    FaultFrom,
    LateHalf,
    audited,
    late_backend,
    regional,
    spoils_buffers,
)
from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import Blocks, fit
from trainer.guards.audits import Audits
from trainer.guards.compare import MULTIPLES, rounding_unit
from trainer.guards.eager import EagerSeen


def test_a_forward_that_goes_wrong_at_step_3_ends_the_run_at_the_next_audit(tmp_path: Path) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    backend = late_backend("forward", guarded.scaled(1.01))
    _, record, error = audited(Blocks(), tmp_path, regional(backend), FaultFrom(3), saved, enable_checkpointing=True)
    assert str(error).startswith("parity=on: step 4 is not eager's: loss ")
    assert "the audit of step 2 was clean" in str(error)
    assert f"Last good checkpoint: {tmp_path}/kept/step=2.ckpt (step 2)" in str(error)
    assert len(str(error).splitlines()) == 1
    assert sorted(path.stem for path in (tmp_path / "kept").iterdir()) == ["step=1", "step=2", "step=3"]
    audits = record.audits
    assert (audits.verdict, audits.steps, audits.last_clean_step) == ("failed", [1, 2, 4], 2)
    assert audits.worst["loss"].step == 4
    assert audits.worst["loss"].difference > audits.worst["loss"].tolerance
    assert record.steps == 3, "the wrong step is not counted"


def test_without_a_checkpoint_the_message_says_so(tmp_path: Path) -> None:
    *_, error = audited(Blocks(), tmp_path, regional(late_backend("forward", guarded.scaled(1.01))), FaultFrom(3))
    assert "Last good checkpoint: none yet." in str(error)


def test_half_of_an_update_is_found_without_a_word_on_the_loss(tmp_path: Path) -> None:
    _, record, error = audited(Blocks(), tmp_path, [LateHalf()], FaultFrom(3))
    assert "step 4 is not eager's: update of 'head.bias' 5.00e-01 of eager's away from it" in str(error)
    assert record.audits.worst["loss"].difference == 0


def test_the_update_of_a_group_of_one_small_parameter_is_looked_at(tmp_path: Path) -> None:
    class Grouped(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            rest = [parameter for parameter in self.parameters() if parameter is not self.stem.bias]
            return torch.optim.SGD([{"params": rest}, {"params": [self.stem.bias], "lr": 0.1}], lr=0.05)

    class OfGroup(LateHalf):
        parameter = "stem.bias"

    *_, error = audited(Grouped(), tmp_path, [OfGroup()], FaultFrom(3))
    assert "step 4 is not eager's: update of 'stem.bias' 5.00e-01 of eager's away from it" in str(error)


def test_somebody_elses_optimizer_strategy_is_given_up_where_it_is_not_eager(tmp_path: Path) -> None:
    expected = fit(Blocks(), tmp_path, [], **LONG)
    with pytest.warns(UserWarning, match="the run continues in eager"):
        losses, record, error = audited(Blocks(), tmp_path, [LateHalf()], FaultFrom(3), on_difference="eager")
    assert error is None
    assert losses[:3] == pytest.approx(expected[:3])
    assert (record.ended_in_eager, list(record.eager_parts)) == (True, ["late_half"])
    assert len(losses) == len(expected)


def test_spoilt_running_statistics_are_found(tmp_path: Path) -> None:
    if "tests_spoils_buffers" not in torch.compiler.list_backends(()):
        torch._dynamo.register_backend(spoils_buffers, name="tests_spoils_buffers")
    module, fault = Traceable(dropout=0.0), FaultFrom(3)
    FAULT["buffers"] = [module.layers[1].norm.running_var]
    _, record, error = audited(module, tmp_path, regional("tests_spoils_buffers"), fault)
    assert "step 4 is not eager's: buffer 'layers.1.norm.running_var' " in str(error)
    assert record.audits.worst["loss"].difference == 0


def test_a_dropout_that_is_taken_apart_is_no_difference(tmp_path: Path) -> None:
    # In double precision it leaves the generator where eager's does, and draws another mask.
    _, record, error = audited(Traceable(), tmp_path, regional("aot_eager_decomp_partition"), precision="64-true")
    assert error is None
    assert record.audits.verdict == "clean"
    assert "other random numbers" in record.audits.not_compared["loss"]


def test_a_buffer_that_hardly_moves_may_be_rounded_twice() -> None:
    unit = rounding_unit("bf16-true", torch.device("cpu"), nn.Identity())
    for dtype, moved in ((torch.bfloat16, 0.02), (torch.float32, 0.02), (torch.bfloat16, 1.0)):
        start = torch.ones(8, dtype=dtype)
        before: Any = None
        seen = EagerSeen(
            left={"buffers": {"variance": start + moved}}, before=before, starts={"variance": start}, drew=False,
            wrote=False,
        )  # fmt: skip
        tolerance = seen.comparison(MULTIPLES["strict"], unit).tolerance("buffers")
        assert tolerance >= 16 * unit + (2.0**-7 / moved if dtype is torch.bfloat16 else 0)
        assert tolerance < 16 * unit + 8 * torch.finfo(dtype).eps * (1 + moved) / moved


def test_a_captured_step_that_is_stale_is_found(tmp_path: Path) -> None:
    _, record, error = audited(Blocks(), tmp_path, [Captured()], FaultFrom(5))
    assert str(error).startswith("parity=on: step 8 is not eager's: loss ")
    assert record.audits.steps == [1, 2, 4, 8]
    assert "captured" in record.report
    assert record.report["captured"]["replayed_steps"] > 3


def test_weights_that_a_captured_step_no_longer_moves_are_found_where_gradients_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeps:
        sample: Any = ()

        @property
        def gradients(self) -> list[torch.Tensor]:
            return [torch.ones_like(parameter) for parameter in self.sample]

    capture, begin = Keeps(), Audits.__init__

    def keeping(self: Audits, *arguments: Any, **named: Any) -> None:
        named["capture"] = capture
        begin(self, *arguments, **named)

    monkeypatch.setattr(Audits, "__init__", keeping)
    *_, error = audited(Blocks(), tmp_path, [Captured()])
    assert capture.sample
    assert "update of" in str(error), "ones are not the gradients"


@pytest.mark.parametrize(("captures", "begins", "at"), [(False, 3, 4), (True, 5, 8)])
def test_on_difference_eager_goes_on_with_eagers_losses(captures: bool, begins: int, at: int, tmp_path: Path) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    strategies = [Captured()] if captures else regional(late_backend("forward", guarded.scaled(1.01)))
    module, options = Blocks(), {"on_difference": "eager", "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="on_difference=eager: the run continues in eager"):
        losses, record, error = audited(module, tmp_path, strategies, FaultFrom(begins), saved, **options)
    assert error is None
    assert (record.audits.verdict, record.audits.steps[-1]) == ("went eager", at)
    assert [event.step for event in record.events if event.kind == "fallback"] == [at]
    assert captures or record.ended_in_eager
    assert len(losses) == LONG["max_steps"]
    assert losses[at:] == pytest.approx(plain(tmp_path / "kept" / f"step={at}.ckpt", at), rel=1e-6)


def plain(checkpoint: Path, at: int) -> list[float]:
    """Losses of a loop without Lightning that continues from ``checkpoint``, on the batches of ``fit``."""
    module, losses = Blocks(), []
    L.seed_everything(0, verbose=False)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    rows, targets = torch.randn(24, 8).split(4), torch.randn(24, 1).split(4)
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    optimizer = module.configure_optimizers()
    module.log = lambda *_: None  # type: ignore[method-assign, assignment]
    for step in range(at, LONG["max_steps"]):
        loss = module.training_step((rows[step % 6], targets[step % 6]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_difference_that_is_gone_when_the_step_is_repeated_ends_nothing(tmp_path: Path) -> None:
    def once(run: Callable[[], Any]) -> Any:
        FAULT["on"] = False  # the next call of the same step is right
        return guarded.scaled(1.01)(run)

    _, record, error = audited(Blocks(), tmp_path, regional(late_backend("once", once)), FaultFrom(3))
    assert error is None
    assert record.audits.verdict == "clean"
    assert record.audits.unrepeated_steps == [4, 8]


def test_what_a_step_keeps_only_if_it_wants_gradients_is_no_difference(tmp_path: Path) -> None:
    class Queue(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(8))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if (features_BD := self.stem(batch[0])).requires_grad:
                self.queue = self.queue.lerp(features_BD.detach().mean(0), 0.5)
            return super().training_step(batch, batch_idx) + (features_BD @ self.queue).mean()

    losses, record, error = audited(Queue(), tmp_path, regional())
    assert error is None
    assert losses == fit(Queue(), tmp_path, [], **LONG)
    audits = record.audits
    assert (audits.verdict, audits.last_clean_step, set(audits.unrepeated_steps)) == ("clean", 8, {1})
