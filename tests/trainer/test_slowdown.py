"""The check for slowdown: a run slower than eager says so once, or continues in eager; a fast one is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from strategies import Optimizer, Regional
from tests.strategies.modules import Block
from tests.trainer import guarded
from tests.trainer.audited import Captured
from tests.trainer.clock import CLOCK
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import RecordingEngine
from trainer.callback import Compile
from trainer.guards.slowdown import STEADY_STEPS, Sample

STEPS = STEADY_STEPS + 6
SECONDS = 0.004

pytestmark = pytest.mark.usefixtures("clock")


class Slow(Blocks):
    """Takes a while outside the blocks, so that what compiling adds or saves in them does not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK.sleep(SECONDS)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def slow_backend() -> Iterator[str]:
    with guarded.backend("tests_slow", guarded.slowed(SECONDS), guarded.as_it_is) as name:
        yield name


def trained(folder: Path, compile_: Compile, module: L.LightningModule | None = None) -> list[float]:
    return fit(module or Slow(), folder, [compile_], max_steps=STEPS)


def test_slower_than_eager_is_said_once_with_both_figures(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], warmup_steps=1)
    with pytest.warns(UserWarning, match=r"slower than eager: a step takes \d+(\.\d+)? ms compiled against \d"):
        losses = trained(tmp_path, compile_)
    facts = compile_.record.report["slowdown"]
    assert facts["slower"]
    later = facts["on_later_batches"][-1]
    assert later["eager_step_seconds"] == pytest.approx(SECONDS)
    assert later["compiled_step_seconds"] == pytest.approx(4 * SECONDS), "the step's own and one for each region"
    assert facts["before_the_first_step"]["eager_step_seconds"] == pytest.approx(SECONDS)
    assert sum("slower than eager" in note for note in compile_.record.notes) == 1
    assert losses == pytest.approx(trained(tmp_path, Compile()), rel=1e-5), "timing leaves no trace"


def test_on_slower_eager_goes_on_eager(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], warmup_steps=1, on_slower="eager", parity="off")
    module = Slow()
    with pytest.warns(UserWarning, match="on_slower=eager: 3 regions go on eager"):
        trained(tmp_path, compile_, module)
    assert all(layer._compiled_call_impl is None for layer in module.layers)
    assert compile_.record.report["slowdown"]["rolled_back"] == ["layers.0", "layers.1", "layers.2"]
    assert [event.kind for event in compile_.record.events if event.step] == ["fallback"]
    assert compile_.record.status == "finished", "nothing failed"


def test_the_timing_is_in_no_steady_step(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], warmup_steps=1)
    with pytest.warns(UserWarning, match="slower than eager"):
        trained(tmp_path, compile_)
    record = compile_.record
    assert record.pause_seconds is not None
    assert record.pause_seconds >= 3 * 5 * SECONDS
    assert record.steady_step_seconds_median is not None
    assert record.steady_step_seconds_p95 is not None
    assert record.steady_step_seconds_p95 == pytest.approx(record.steady_step_seconds_median)


class SlowEager(Block):
    """Compiling saves something here."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            CLOCK.sleep(SECONDS)
        return super().forward(x_BD)


def test_a_slow_loader_does_not_pass_for_a_slow_compile(tmp_path: Path) -> None:
    class Waits(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.sleep(6 * SECONDS)

    module = Slow()
    module.layers = torch.nn.ModuleList(SlowEager() for _ in range(3))
    compile_ = Compile([Regional(backend="aot_eager")], warmup_steps=1)
    fit(module, tmp_path, [Waits(), compile_], max_steps=STEPS)
    facts = compile_.record.report["slowdown"]
    assert facts["on_later_batches"]
    assert facts["slower"] is False
    assert not any("slower than eager" in note for note in compile_.record.notes)


def test_without_parity_and_rollback_eager_is_not_timed(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], parity="off")
    trained(tmp_path, compile_)
    assert "slowdown" not in compile_.record.report


@pytest.mark.parametrize(
    ("eager", "compiled", "slower"),
    [
        ([1.0, 1.0, 1.0], [1.1, 1.2, 1.1], True),
        ([1.0, 1.0, 1.0], [1.04, 1.04, 1.04], False),
        ([1.0, 1.3, 0.9], [0.9, 1.2, 1.2], False),
        ([1.0], [0.5], False),
    ],
)
def test_only_what_is_beyond_the_spread_is_slower(eager: list[float], compiled: list[float], slower: bool) -> None:
    assert Sample(eager_seconds=eager, compiled_seconds=compiled).slower is slower


class Decaying(Blocks):
    """Its rate changes in every step, and AdamW counts steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_timing_eager_beside_graphs_leaves_the_optimizer_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager's own step counts in the optimizer's state, which a compiled one takes for another plan.
    capturing = False
    capture = RecordingEngine.capture

    def flagged(self: RecordingEngine, call: Any) -> Any:
        def captured() -> Any:
            nonlocal capturing
            capturing = True
            try:
                return call()
            finally:
                capturing = False

        return capture(self, captured)

    monkeypatch.setattr(RecordingEngine, "capture", flagged)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    compile_ = Compile([Regional(backend="eager"), Optimizer(backend="eager"), Captured()])
    fit(Decaying(), tmp_path, [compile_], max_steps=STEADY_STEPS + 20, max_epochs=-1)
    facts, steps = compile_.record.report["captured"], STEADY_STEPS + 20
    assert compile_.record.report["slowdown"]["on_later_batches"]
    assert facts["captured"] == ["whole step on 4x8 4x1"]
    assert (facts["refused"], facts["replayed_steps"] + facts["eager_steps"]) == ([], steps)
