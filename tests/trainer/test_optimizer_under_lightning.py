"""``compile=optimizer`` under Lightning's Trainer: its closures, clipping, accumulation, schedules, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from strategies import Optimizer
from strategies.optimizer.functional import Chunk
from tests.strategies import backends
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.guards import CompileFailed, ParityError


class Scheduled(Blocks):
    """AdamW under one cycle, which changes learning rate and betas at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def compiled(*others: Any, **options: Any) -> Compile:
    return Compile([Optimizer(backend="eager"), *others], **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    ],
    ids=["plain", "clip norm", "clip value", "accumulation", "bf16"],
)
def test_losses_are_eagers_without_a_recompile(options: dict[str, Any], tmp_path: Path) -> None:
    eager = fit(Scheduled(), tmp_path, [], **options)
    compile_ = compiled()
    losses = fit(Scheduled(), tmp_path, [compile_], **options)
    assert losses == pytest.approx(eager, rel=1e-5)
    assert compile_.record.recompiles == 0
    assert compile_.record.graphs == 2, "one for the blocks, one for stem and head"
    assert compile_.record.report["optimizer"]["form"] == "functional"
    assert compile_.record.report["optimizer"]["tensors"] == 16


class ClipsItself(Scheduled):
    """Looks at its gradients once they are clipped."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()])  # type: ignore[misc]
        assert norm <= 0.0501


def test_a_module_that_clips_by_itself_is_left_to_it(tmp_path: Path) -> None:
    eager = fit(ClipsItself(), tmp_path, [])
    assert fit(ClipsItself(), tmp_path, [compiled()]) == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_resumed_run_goes_on_as_eager_does(before: bool, after: bool, tmp_path: Path) -> None:
    saved, ended = {}, {}
    for name, first, second in (("eager", False, False), ("other", before, after)):
        folder = tmp_path / name
        keep = {"enable_checkpointing": True, "max_steps": 3}
        saved[name] = fit(Scheduled(), folder, [compiled()] if first else [], **keep)
        (checkpoint,) = folder.rglob("*.ckpt")
        compile_ = compiled()
        ended[name] = fit_from(checkpoint, [compile_] if second else [], folder)
        if second:
            assert compile_.record.recompiles == 0
    assert saved["other"] == pytest.approx(saved["eager"], rel=1e-5)
    assert ended["other"] == pytest.approx(ended["eager"], rel=1e-5)
    assert len(ended["eager"]) == 3


def fit_from(checkpoint: Path, callbacks: list[Any], folder: Path) -> list[float]:
    import lightning as L

    original = L.Trainer.fit

    def resumed(self: L.Trainer, *given: Any, **named: Any) -> None:
        original(self, *given, ckpt_path=checkpoint, weights_only=True, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(L.Trainer, "fit", resumed)
        return fit(Scheduled(), folder, callbacks)


# ---- checks ----------------------------------------------------------------------------------------------------------


class WrongFrom(L.Callback):
    """From one step on, what was compiled writes a weight a thousandth off."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self._from, self._patch = step, patch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self._from:
            run = Chunk.__call__

            def wrong(chunk: Chunk, lists: Any, *given: Any) -> None:
                run(chunk, lists, *given)
                lists[0][0][0].detach().view(-1)[0].add_(1e-3)

            self._patch.setattr(Chunk, "__call__", wrong)


def test_its_checks_are_in_the_record(tmp_path: Path) -> None:
    compile_ = compiled()
    fit(Scheduled(), tmp_path, [compile_], max_steps=10)
    parity, audits = compile_.record.report["parity"], compile_.record.audits
    assert (parity["verdict"], parity["checks"], parity["how"]) == ("passed", 1, ["exact"])
    assert {"weight", "exp_avgs", "exp_avg_sqs"} == parity["worst"].keys()
    assert (audits.verdict, audits.steps, audits.last_clean_step) == ("clean", [2, 4, 8, 10], 10)
    assert compile_.record.eager_parts == {}


def test_an_update_that_becomes_wrong_goes_eager_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = compiled()
    losses = fit(Scheduled(), tmp_path, [WrongFrom(3, monkeypatch), compile_], max_steps=10)
    record = compile_.record
    assert (record.status, len(losses)) == ("finished", 10)
    assert list(record.eager_parts) == ["optimizer"]
    assert "differs from torch's: weight" in record.eager_parts["optimizer"]
    assert (record.audits.verdict, record.audits.last_clean_step) == ("went eager", 2)
    assert record.audits.steps == [2, 4, 5], "a difference counts when it shows twice"
    assert "since step 2" in record.audits.reason
    assert record.report["optimizer"]["form"] == "eager"


@pytest.mark.parametrize("step", [1, 3])
def test_on_difference_fail_ends_the_run(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParityError, match=r"^on_difference=\"fail\": AdamW's step .*differs from torch's"):
        fit(Scheduled(), tmp_path, [WrongFrom(step, monkeypatch), compiled(on_difference="fail")])


def test_on_compile_error_fail_ends_the_run(tmp_path: Path) -> None:
    backends.register()
    compile_ = Compile([Optimizer(backend=backends.BROKEN_FORWARD)], on_compile_error="fail")
    with pytest.raises(CompileFailed, match=r"^on_compile_error=\"fail\": AdamW's step .*compiles no forward"):
        fit(Scheduled(), tmp_path, [compile_])
