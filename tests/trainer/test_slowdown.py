"""The check for slowdown: a run slower than eager says so once, or continues in eager; a fast one is left alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from strategies import Optimizer, Regional
from tests.strategies.modules import Block
from tests.trainer import guarded
from tests.trainer.audited import Captured
from tests.trainer.clock import CLOCK, Clock
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.manual_modules import Adversaries
from tests.trainer.recording import RecordingEngine
from trainer.callback import Compile
from trainer.guards.slowdown import APART_STEPS, ENOUGH_PAIRS, FIRST_PAIRS, SHARE, STEADY_STEPS, Sample, Slowdown
from trainer.report.run_verdict import run_verdict

STEPS = STEADY_STEPS + 6 + APART_STEPS * ENOUGH_PAIRS
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
    assert later["eager_seconds"] == pytest.approx([SECONDS])
    assert later["compiled_seconds"] == pytest.approx([4 * SECONDS]), "the step's own and one for each region"
    assert facts["before_the_first_step"]["eager_seconds"] == pytest.approx([SECONDS] * FIRST_PAIRS)
    assert sum("slower than eager" in note for note in compile_.record.notes) == 1
    assert losses == pytest.approx(trained(tmp_path, Compile()), rel=1e-5), "timing leaves no trace"


def test_on_slower_eager_goes_on_eager(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], warmup_steps=1, on_slower="eager", parity="off")
    module = Slow()
    with pytest.warns(UserWarning, match="on_slower=eager: 3 regions go on eager"):
        trained(tmp_path, compile_, module)
    assert compile_.record.ended_in_eager
    assert compile_.record.report["slowdown"]["rolled_back"] == ["layers.0", "layers.1", "layers.2"]
    assert [event.kind for event in compile_.record.events if event.step] == ["fallback"]
    assert compile_.record.status == "finished", "nothing failed"


def test_the_timing_is_in_no_steady_step(slow_backend: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow_backend)], warmup_steps=1)
    with pytest.warns(UserWarning, match="slower than eager"):
        trained(tmp_path, compile_)
    record = compile_.record
    assert record.pause_seconds is not None
    pairs_seconds = record.pause_seconds - record.audits.seconds
    assert pairs_seconds == pytest.approx(ENOUGH_PAIRS * 10 * SECONDS), "two steps of each a pair"
    assert record.steady_step_seconds_median is not None
    assert record.steady_step_seconds_p95 is not None
    assert record.steady_step_seconds_p95 == pytest.approx(record.steady_step_seconds_median)


class Watched(L.Callback):
    """Seconds from the beginning of a batch to the next one's, what the guards do included."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.began.append(CLOCK.now)

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.began)]


def test_pairs_lie_apart_and_take_their_share_of_the_run_and_no_more(tmp_path: Path) -> None:
    watched = Watched()
    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
    fit(Slow(), tmp_path, [watched, compile_], max_steps=400)
    pairs = [number for number, seconds in enumerate(watched.seconds) if seconds > 3 * SECONDS]  # audits take one
    later = compile_.record.report["slowdown"]["on_later_batches"]
    assert len(pairs) == len(later) == 5, "four steps each, and a twentieth of the run"
    assert all(watched.seconds[number] == pytest.approx(5 * SECONDS) for number in pairs), "a pair at a time"
    assert [len(one["eager_seconds"]) for one in later] == [1] * 5
    assert min(after - before for before, after in itertools.pairwise(pairs)) >= APART_STEPS
    assert len(pairs) * 4 * SECONDS <= SHARE * (watched.began[-1] - watched.began[0]) + 1e-9
    assert compile_.record.report["slowdown"]["short_of_time"]


def test_a_step_that_counts_several_times_takes_no_larger_share(tmp_path: Path) -> None:
    class Adversarial(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            CLOCK.sleep(SECONDS)
            super().training_step(batch, batch_idx)

    watched = Watched()
    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
    fit(Adversarial(), tmp_path, [watched, compile_], max_steps=2 * 100)  # global_step counts both optimizers' steps
    pairs = sum(seconds > 3 * SECONDS for seconds in watched.seconds)
    assert pairs == len(compile_.record.report["slowdown"]["on_later_batches"]) == 1
    assert pairs * 4 * SECONDS <= SHARE * (watched.began[-1] - watched.began[0]) + 1e-9


def test_a_run_that_is_too_short_for_a_pair_says_so(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
    fit(Slow(), tmp_path, [compile_], max_steps=STEADY_STEPS + 20)
    record = compile_.record
    assert "on_later_batches" not in record.report["slowdown"]
    del record.report["slowdown"]["before_the_first_step"]
    assert run_verdict(record).reason == (
        "timing eager beside it takes 5% of a run at most, and this one was too short"
    )


def test_all_processes_time_a_pair_at_the_same_step(clock: Clock) -> None:
    clock.sleep(100.0)
    sent: list[Any] = []
    found = []
    for began_seconds, broadcast in ((0.0, lambda value: sent.append(value) or value), (99.0, lambda _: sent.pop(0))):
        loop: Any = SimpleNamespace(world_size=2, micro_batches=1, broadcast=broadcast)
        loop.anywhere = loop.everywhere = bool
        steady = SimpleNamespace(seconds=[0.01] * STEADY_STEPS)
        meter = SimpleNamespace(steady=steady, median_seconds=0.01, ended=100)
        telemetry: Any = SimpleNamespace(began=began_seconds, meter=meter)
        slowdown = Slowdown(loop, telemetry, None)
        slowdown.check()
        found.append(slowdown.wanted)
    assert found == [True, True], "by its own clock the second one would wait for a hundred steps"


class SlowEager(Block):
    """Compiling saves something here."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            CLOCK.sleep(SECONDS)
        return super().forward(x_BD)


def test_a_slow_loader_does_not_pass_for_a_slow_compile(tmp_path: Path) -> None:
    class Waits(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.sleep(20 * SECONDS)

    module = Slow()
    module.layers = torch.nn.ModuleList(SlowEager() for _ in range(3))
    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
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


class Hooked(L.Callback):
    def on_after_backward(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("others", "why"), [([], "changes CLOCK.now"), ([Hooked()], "Hooked.on_after_backward")])
def test_steps_whose_capture_is_refused_are_timed_as_any_other(
    others: list[L.Callback], why: str, slow_backend: str, tmp_path: Path
) -> None:
    compile_ = Compile([Regional(backend=slow_backend), Captured()], warmup_steps=1)
    with pytest.warns(UserWarning, match=r"slower than eager: a step takes \d"):
        fit(Slow(), tmp_path, [compile_, *others], max_steps=STEPS)
    assert compile_.record.report["captured"]["refused"][0].startswith(why)
    assert [one["replayed"] for one in compile_.record.report["slowdown"]["on_later_batches"]] == [False] * ENOUGH_PAIRS


def test_captured_steps_are_timed_beside_eager_without_parity_too(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="eager"), Captured()], warmup_steps=1, on_slower="eager", parity="off")
    fit(Blocks(), tmp_path, [compile_], max_steps=400, max_epochs=-1)
    record = compile_.record
    assert record.report["captured"]["captured"] == ["whole step on 4x8 4x1"]
    later = record.report["slowdown"]["on_later_batches"]
    assert later, "a run of 400 steps is not too short"
    assert all(one["replayed"] for one in later)


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
