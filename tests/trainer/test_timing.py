"""Eager beside the run: windows of real steps, what they say, and that nothing is called again for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from strategies import Regional
from tests.strategies import backends
from tests.strategies.backends import Fault
from tests.strategies.modules import Block
from tests.trainer.clock import CLOCK, Clock, stop_time
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import Recorded
from trainer.callback import Compile
from trainer.guards.timing import APART_STEPS, ENOUGH, SHARE, STEADY_STEPS, WINDOW, Timing
from trainer.report.run_verdict import run_verdict
from trainer.telemetry.record import RunRecord

SECONDS = 0.004
STEPS, FEWER_STEPS = 700, 200
"""Of a training whose eager steps take four times as long: enough for two windows. Where they take less, fewer do."""

pytestmark = pytest.mark.usefixtures("clock")


class Timed(Blocks):
    """Takes a while outside the blocks; knows its calls, and when its blocks ran eager."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.batches: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK.sleep(SECONDS)
        self.batches.append((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)


class SlowEager(Block):
    """Compiling saves something here; it knows the steps in which it ran eager."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            CLOCK.sleep(SECONDS)
        return super().forward(x_BD)


class Watched(L.Callback):
    """Seconds of each step, from the beginning of a batch to the beginning of the next one."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(CLOCK.now)

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.ended)]


@pytest.fixture
def slow() -> Iterator[str]:
    """A backend whose graphs take a while, forward and backward."""
    Fault.before = lambda: CLOCK.sleep(SECONDS)  # type: ignore[method-assign]
    yield backends.FAULTY
    Fault.clear()


@dataclass(frozen=True)
class Trained:
    """One training, and what was seen of it."""

    module: Timed
    losses: list[float]
    seconds: list[float]
    """From the beginning of a batch to the beginning of the next one."""
    record: RunRecord


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Faster than eager, which would take four times as long."""
    with pytest.MonkeyPatch.context() as patch:
        stop_time(patch)
        module, watched, compile_ = Timed(SlowEager), Watched(), Compile([Regional(backend="eager")], warmup_steps=1)
        losses = fit(module, tmp_path_factory.mktemp("faster"), [watched, compile_], max_steps=STEPS)
    return Trained(module, losses, watched.seconds, compile_.record)


def test_a_run_that_is_faster_says_so_and_trains_on_every_batch_once(faster: Trained, tmp_path: Path) -> None:
    facts = faster.record.report["slowdown"]
    assert facts["slower"] is False
    assert len(facts["on_later_batches"]) >= 2
    for window in facts["on_later_batches"]:
        assert window["eager_seconds"] == pytest.approx([4 * SECONDS] * WINDOW)
        assert window["compiled_seconds"] == pytest.approx([SECONDS] * WINDOW)
        assert window["replayed"] is False
    plain = Timed(SlowEager)
    assert faster.losses == pytest.approx(fit(plain, tmp_path, [], max_steps=STEPS), rel=1e-5)
    assert faster.module.batches == plain.batches, "each batch once, in the loader's order"
    assert not any("slower than eager" in note for note in faster.record.notes)
    assert faster.record.eager_parts == {}


def test_windows_lie_apart_and_take_their_share_of_the_run_and_no_more(faster: Trained) -> None:
    eager = [number + 2 for number, seconds in enumerate(faster.seconds) if seconds > 3.5 * SECONDS]
    windows = [eager[place : place + 1 + WINDOW] for place in range(0, len(eager), 1 + WINDOW)]
    assert all(window[-1] - window[0] == WINDOW for window in windows), "steps in a row"
    assert windows[0][0] > STEADY_STEPS
    between = [second[0] - first[-1] for first, second in itertools.pairwise(windows)]
    assert min(between) >= APART_STEPS
    spent = len(eager) * 4 * SECONDS
    assert spent <= SHARE * sum(faster.seconds) + 4 * SECONDS
    assert len(windows) == len(faster.record.report["slowdown"]["on_later_batches"])


def test_windows_are_in_no_steady_figure(faster: Trained) -> None:
    assert faster.record.steady_step_seconds_median == pytest.approx(SECONDS)
    assert faster.record.steady_step_seconds_p95 == pytest.approx(SECONDS)


def test_slower_than_eager_is_said_once_with_both_figures(slow: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend=slow)], warmup_steps=1)
    with pytest.warns(UserWarning, match=r"slower than eager: a step takes 28(\.0)? ms compiled against 4(\.0)? ms"):
        fit(Timed(), tmp_path, [compile_], max_steps=FEWER_STEPS)
    record = compile_.record
    assert record.report["slowdown"]["slower"]
    assert sum("slower than eager" in note for note in record.notes) == 1
    assert len(record.report["slowdown"]["on_later_batches"]) == ENOUGH, "then it is known"
    assert record.regions_compiled == 3
    assert record.eager_parts == {}


@pytest.mark.parametrize("parity", ["on", "off"])
def test_on_slower_eager_goes_on_eager(parity: str, slow: str, tmp_path: Path) -> None:
    module, watched = Timed(), Watched()
    compile_ = Compile([Regional(backend=slow)], warmup_steps=1, on_slower="eager", parity=parity)
    with pytest.warns(UserWarning, match="slower than eager"):
        fit(module, tmp_path, [watched, compile_], max_steps=FEWER_STEPS)
    record = compile_.record
    assert record.ended_in_eager
    assert list(record.eager_parts) == ["layers.0", "layers.1", "layers.2"]
    assert record.report["slowdown"]["rolled_back"] == ["layers.0", "layers.1", "layers.2"]
    assert record.status == "finished", "nothing failed"
    assert watched.seconds[-1] == pytest.approx(SECONDS)
    assert len(module.batches) == FEWER_STEPS


def test_replayed_steps_are_timed_as_replayed(tmp_path: Path) -> None:
    class Sleeps(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            CLOCK.sleep(SECONDS)

    compile_ = Compile([Recorded()], warmup_steps=1)
    fit(Blocks(), tmp_path, [compile_, Sleeps()], max_steps=FEWER_STEPS)
    record = compile_.record
    windows = record.report["slowdown"]["on_later_batches"]
    assert [one["replayed"] for one in windows] == [True] * len(windows)
    assert record.report["recorded"]["replayed_steps"] > FEWER_STEPS / 2
    assert all(one["eager_seconds"] == pytest.approx([SECONDS] * WINDOW) for one in windows)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    module, compile_ = Timed(SlowEager), Compile([Regional(backend="eager")], warmup_steps=1)
    fit(module, tmp_path, [compile_], max_steps=STEPS // 2, accumulate_grad_batches=2)
    facts = compile_.record.report["slowdown"]
    assert facts["micro_batches"] == 2
    assert facts["on_later_batches"][0]["eager_seconds"] == pytest.approx([8 * SECONDS] * WINDOW)
    assert facts["on_later_batches"][0]["compiled_seconds"] == pytest.approx([2 * SECONDS] * WINDOW)


def test_a_slow_loader_does_not_pass_for_a_slow_compile(tmp_path: Path) -> None:
    class Waits(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.sleep(20 * SECONDS)

    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
    fit(Timed(SlowEager), tmp_path, [compile_, Waits()], max_steps=300)
    windows = compile_.record.report["slowdown"]["on_later_batches"]
    assert windows[0]["compiled_seconds"] == pytest.approx([SECONDS] * WINDOW)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (STEADY_STEPS + 20, "timing eager beside it takes 5% of a run at most, and this one was too short"),
        (12, f"eager is timed beside it from {STEADY_STEPS} steady steps on, and it had 7"),
    ],
)
def test_a_run_that_is_too_short_for_a_window_says_so(steps: int, why: str, tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="eager")], warmup_steps=1)
    fit(Timed(), tmp_path, [compile_], max_steps=steps)
    assert "on_later_batches" not in compile_.record.report["slowdown"]
    assert run_verdict(compile_.record).reason == why


@pytest.mark.parametrize("compiled", [True, False])
def test_eager_is_not_timed_without_checks_or_beside_itself(compiled: bool, slow: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"parity": "off"} if compiled else {}
    compile_ = Compile([Regional(backend=slow)] if compiled else [], warmup_steps=1, **options)
    fit(Timed(), tmp_path, [compile_], max_steps=200)
    assert "slowdown" not in compile_.record.report


def test_all_processes_begin_a_window_at_the_same_step(clock: Clock) -> None:
    clock.sleep(100.0)
    sent: list[Any] = []
    found = []
    for began, broadcast in ((0.0, lambda value: sent.append(value) or value), (99.0, lambda _: sent.pop(0))):
        loop: Any = SimpleNamespace(
            world_size=2, micro_batches=1, broadcast=broadcast, any_rank=bool, all_ranks=bool,
            steps_done=100, log_every_n_steps=50, device=torch.device("cpu"),
        )  # fmt: skip
        meter = SimpleNamespace(steady=SimpleNamespace(seconds=[0.01] * STEADY_STEPS), median_seconds=0.01, ended=100)
        program: Any = SimpleNamespace(regions=[object()], step=None, compiled_beside_regions=[])
        telemetry: Any = SimpleNamespace(began=began, meter=meter)
        timing = Timing(loop, program, telemetry, lambda line: None, wanted=True)
        timing.after(stepped=True)
        found.append(timing._next)
    assert found[0] == found[1], "by its own clock the second one would wait for a hundred steps"


class Device:
    """A device that works off what it was given, and the points in its time that a ``StepClock`` takes."""

    def __init__(self, *_: Any) -> None:
        self.free = 0.0

    def work(self, host: float, device: float) -> None:
        """The host launches for ``host`` seconds, the device begins after a third of them and works for ``device``."""
        began = max(CLOCK.now + host / 3, self.free)
        CLOCK.sleep(host)
        self.free = max(began + device, CLOCK.now)

    def wait(self, _: Any) -> None:
        CLOCK.now = max(CLOCK.now, self.free)

    def now(self) -> float:
        return max(CLOCK.now, self.free)

    def seconds(self, began: float, ended: float) -> float:
        CLOCK.now = max(CLOCK.now, ended)  # it waits until this was reached
        return ended - began


@pytest.mark.parametrize(
    ("host", "device", "step"), [(3.0, 4.0, 4.0), (4.0, 3.0, 4.0)], ids=["the device is the limit", "the host is"]
)
def test_eager_launches_ahead_in_a_window_as_it_does_without_one(
    host: float, device: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On an H200 eager's step of ResNet-50 took 40 ms in windows that were waited for step by step, and 32.7 otherwise.
    gpu = Device()
    monkeypatch.setattr("trainer.guards.timing.StepClock", lambda _: gpu)
    monkeypatch.setattr("trainer.guards.timing.hardware.synchronize", gpu.wait)
    monkeypatch.setattr("trainer.guards.timing.eager", lambda _: contextlib.nullcontext())
    loop: Any = SimpleNamespace(
        world_size=1, micro_batches=1, broadcast=lambda value: value, any_rank=bool, all_ranks=bool, steps_done=1,
        log_every_n_steps=50, device=torch.device("cpu"),
    )  # fmt: skip
    meter = SimpleNamespace(median_seconds=1.0, ended=10)
    telemetry: Any = SimpleNamespace(began=0.0, meter=meter, leave_out=lambda: None)
    program: Any = SimpleNamespace(replays=0, report={}, step=None)
    timing = Timing(loop, program, telemetry, lambda line: None, wanted=True)
    timing._next = 10
    ends = []
    for number in range(2 * (1 + WINDOW) + 2):
        timing.before(None)
        gpu.work(host, device) if number < 1 + WINDOW else gpu.work(0.1, 2.0)
        ends.append(gpu.free)
        timing.after(stepped=True)
    (window,) = timing._windows
    # Where the times are read at once, the device has nothing to do until the next step is launched.
    assert [end - began for began, end in pairwise(ends[-3:])] == pytest.approx([2.0, 2.0])
    assert window.eager_seconds == pytest.approx([step] * WINDOW)
    assert window.compiled_seconds == pytest.approx([2.0] * WINDOW)


def test_why_captured_steps_of_several_processes_have_no_windows_is_said() -> None:
    loop: Any = SimpleNamespace(world_size=2, all_ranks=bool, steps_done=50, log_every_n_steps=50)
    meter = SimpleNamespace(median_seconds=1.0, ended=50, steady=SimpleNamespace(seconds=[1.0] * STEADY_STEPS))
    program: Any = SimpleNamespace(report={}, regions=[], step=object(), replays=0)
    telemetry: Any = SimpleNamespace(meter=meter)
    timing = Timing(loop, program, telemetry, lambda line: None, wanted=True)
    timing.after(stepped=True)
    record = RunRecord(task="micro", strategies=[{"name": "cuda_graph"}], status="finished")
    record.report = program.report
    assert "captured steps of several processes are not interrupted" in str(run_verdict(record))
    timing.close()
    assert program.report == record.report
