"""``compile=optimizer`` under Lightning's Trainer: its closures, clipping, accumulation, schedules."""

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


@pytest.mark.parametrize("step", [1, 3])
def test_on_difference_fail_ends_the_run(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParityError, match=r"^on_difference=\"fail\": AdamW's step .*differs from torch's"):
        fit(Scheduled(), tmp_path, [WrongFrom(step, monkeypatch), compiled(on_difference="fail")])


def test_on_compile_error_fail_ends_the_run(tmp_path: Path) -> None:
    backends.register()
    compile_ = Compile([Optimizer(backend=backends.BROKEN_FORWARD)], on_compile_error="fail")
    with pytest.raises(CompileFailed, match=r"^on_compile_error=\"fail\": AdamW's step .*compiles no forward"):
        fit(Scheduled(), tmp_path, [compile_])
