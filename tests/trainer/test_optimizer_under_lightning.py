"""``compile=optimizer`` under Lightning's Trainer: its closures, clipping, accumulation, schedules, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies import Optimizer, Regional
from strategies.optimizer import installed
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile


class Scheduled(Blocks):
    """AdamW under one cycle, which changes learning rate and betas at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def compiled(*others: Any, parity: str = "off", **options: Any) -> Compile:
    # No preflight: its steps of eager would clip as eager does.
    return Compile([Optimizer(backend="eager", **options), *others], parity=parity)


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


def test_it_goes_with_compiled_blocks_and_the_preflight_leaves_no_trace(tmp_path: Path) -> None:
    eager = fit(Scheduled(), tmp_path, [])
    compile_ = compiled(Regional(backend="eager"), parity="strict")
    assert fit(Scheduled(), tmp_path, [compile_]) == pytest.approx(eager, rel=1e-5)
    assert compile_.record.label == "regional+optimizer"
    assert compile_.record.report["optimizer"]["form"] == "functional"
    assert compile_.record.recompiles == 0
    assert compile_.record.graphs == 3
    assert compile_.record.regions_compiled == 3


def test_clipping_is_part_of_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = fit(Scheduled(), tmp_path, [], gradient_clip_val=0.05)
    called = []
    original = nn.utils.clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *given, **named: called.append(original(*given, **named)))
    losses = fit(Scheduled(), tmp_path, [compiled()], gradient_clip_val=0.05)
    assert losses == pytest.approx(eager, rel=1e-5)
    assert called == []
    unclipped = fit(Scheduled(), tmp_path, [compiled()])
    assert unclipped != pytest.approx(eager, rel=1e-5), "clipping makes a difference here"


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


def test_checkpoints_hold_what_eagers_hold(tmp_path: Path) -> None:
    states = []
    for name, callbacks in (("eager", []), ("compiled", [compiled()])):
        fit(Scheduled(), tmp_path / name, callbacks, enable_checkpointing=True)
        (checkpoint,) = (tmp_path / name).rglob("*.ckpt")
        states.append(torch.load(checkpoint, weights_only=True)["optimizer_states"])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-7)


def test_after_training_optimizer_and_trainer_are_themselves(tmp_path: Path) -> None:
    class Seen(Scheduled):
        def on_train_batch_end(self, *_: Any) -> None:
            self.installed = installed(self.trainer.optimizers[0])
            self.kept = self.trainer.optimizers[0], self.trainer.precision_plugin

    module = Seen()
    fit(module, tmp_path, [compiled()], gradient_clip_val=0.05)
    optimizer, plugin = module.kept
    assert module.installed is not None
    assert installed(optimizer) is None
    assert optimizer.step.__wrapped__ is torch.optim.AdamW.step, "the scheduler's wrapper of torch's own"
    assert "clip_grad_by_norm" not in vars(plugin)


def test_several_optimizers_under_manual_optimization(tmp_path: Path) -> None:
    class Manual(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(self.layers.parameters(), lr=1e-2), torch.optim.SGD(self.head.parameters(), 0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            return {"loss": loss.detach()}

    eager = fit(Manual(), tmp_path, [])
    compile_ = compiled()
    assert fit(Manual(), tmp_path, [compile_]) == pytest.approx(eager, rel=1e-5)
    assert compile_.record.report["optimizer"]["form"] == "functional, functional"
    assert compile_.record.report["optimizer"]["tensors"] == 14
