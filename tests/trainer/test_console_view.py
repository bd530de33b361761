"""What a person sees: a summary that never shows a figure that does not exist, and lines that say it is compiling."""

from __future__ import annotations

import io
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

import trainer.console
from trainer.console import ProgressView, SecondsLeft, print_end, print_rows, seconds_left, summary
from trainer.telemetry.compiler import Compiling
from trainer.telemetry.machine_monitor import MachineFacts
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.source_lines import raised_at

GOLDEN = Path(__file__).with_name("golden") / "end_of_run.txt"
COMPILED: dict[str, Any] = {"label": "regional", "strategies": [{"name": "regional"}]}


def printed(console: Console) -> str:
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    """A console that is no terminal."""
    return Console(file=io.StringIO(), width=120)


GUARD = "tensor 'x' size mismatch at index 1. expected 8, actual 9"
RECOMPILES = [
    Event(kind="recompile", reason="GLOBAL_STATE changed: grad_mode", phase="validating", step=4),
    *(Event(kind="recompile", reason=GUARD, step=step) for step in (1, 2, 3)),
    Event(kind="graph_break", reason="print"),
]
NEAREST = {
    "output": {"what": "0", "difference": 8e-8, "tolerance": 1e-5},
    "gradient": {"what": "weight", "difference": 4e-6, "tolerance": 1e-5},
}
PASSED: dict[str, Any] = {"verdict": "passed", "checks": 7, "how": ["exact"], "worst": NEAREST}
COST: dict[str, Any] = {
    "compile_seconds": 12.34, "graphs": 5, "graph_breaks": 0, "recompiles": 2, "regions": 7, "regions_compiled": 7,
    "cache": "mixed", "cache_hits": 3, "cache_misses": 2, "final_metrics": {"val/loss": 1.5}, **COMPILED,
    "skipped_items": {"caption is longer than pad_to": 4, "image does not decode": 0},
}  # fmt: skip
FELL_BACK: dict[str, Any] = {**COST, "regions": 0, "events": [Event(kind="fallback", reason="no formula")]}
AGAIN: dict[str, Any] = {"graphs": 9, "graph_breaks": 1, "recompiles": 4, "events": RECOMPILES, **COMPILED}
SMALL_AND_LARGE: dict[str, Any] = {
    "steps": 12_345, "steady_steps": 12_340, "steady_steps_per_second": 0.004, "steady_step_seconds_p95": 3e-7,
    "model_flops_utilization_measured_peak": 0.4567, "steady_step_seconds_median": 2.08, "final_loss": 1e-6,
    "joules_per_sample": 0.00012, "warmup_seconds": 1234.5, "warmup_steps": 10_000,
}  # fmt: skip
SUMMARIES: dict[str, dict[str, Any]] = {
    "compiled, nothing known": COMPILED,
    "eager, nothing known": {},
    "two processes, stopped before a steady step": {"world_size": 2, "padded_share": 0.3},
    "small and large figures": SMALL_AND_LARGE,
    "eager": {"steps": 4, "warmup_seconds": 1.0, "warmup_steps": 2},
    "what compiling cost": COST,
    "fell back to eager": FELL_BACK,
    "failed": {**FELL_BACK, "status": "failed"},
    "recompiles of a validation": AGAIN,
    "recompiles of planned shapes": {**AGAIN, "report": {"buckets": {"batch_sizes": [8, 4, 2]}}},
    "parity": {"report": {"parity": PASSED}, **COMPILED},
    "parity of draws": {"report": {"parity": {**PASSED, "how": ["exact", "seeds"]}}, **COMPILED},
    "parity of nothing": {"report": {"parity": {**PASSED, "worst": {}}}, **COMPILED},
    "parity of an input": {"report": {"parity": {**PASSED, "worst": {"gradient of": NEAREST["gradient"]}}}, **COMPILED},
    "parity of one check": {"report": {"parity": {**PASSED, "checks": 1}}, **COMPILED},
    "what strategies found": {
        "report": {
            "cuda_graph": {
                "graphs": 0,
                "replayed_steps": 0,
                "eager_steps": 4,
                "captured": [],
                "refused": ["[b]x", "y"],
            },
            "optimizer": {"form": "functional", "compiled_milliseconds": None},
            "theirs": {"kernels": 3, "tuning": {"search_seconds": 2.0}},
            "cached": {"verdict": "skipped"},
            "warming": {},
        }
    },
}
"""Fields of records."""


def eventful() -> RunRecord:
    """A run that has much to say."""
    pairs = {"eager_seconds": [0.0407, 0.041, 0.042], "compiled_seconds": [0.040, 0.041, 0.0399]}
    worst = {"gradient": {"what": "weight", "difference": 7.8e-07, "tolerance": 1.4e-06}}
    record = RunRecord(task="captioning", status="finished", graphs=6, graph_breaks=0, **COMPILED)
    record.command = ["task=captioning", "task/data=coco", "task.data.root=/data/coco/2017", "compile=regional"]
    record.report = {
        "parity": {"verdict": "passed", "checks": 14, "how": ["exact"], "worst": worst},
        "slowdown": {"before_the_first_step": pairs, "on_later_batches": [pairs] * 19},
        "cached": {"state": "idle", "reason": "nothing was compiled by Inductor"},
    }
    record.compile_seconds, record.recompiles, record.regions, record.regions_compiled = 199.3, 2, 10, 9
    record.cache, record.cache_hits, record.cache_misses = "cold", 0, 12
    record.machine = MachineFacts(seconds=9.0, processors=2, load_average=7.9, other_processors=1.5)
    record.warmup_seconds, record.warmup_steps, record.steady_steps, record.steps = 267.14, 6, 540, 600
    record.steady_step_seconds_mean, record.steady_step_seconds_median = 0.0412, 0.0401
    record.steady_step_seconds_p95, record.steady_steps_per_second = 0.0681, 24.2
    record.samples_per_second, record.peak_process_memory_gib, record.final_loss = 387.0, 1.07, 1.1418
    record.events = [Event(kind="fallback", reason="DecoderBlock: decoder.3 runs eager from step 2 on: it differs")]
    record.skipped_items = {"image does not decode": 2}
    record.notes = ["decoder: " + "a long note that says what helps " * 3] * 7
    return record


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x  # of a shape that does not fit


def failed() -> RunRecord:
    """Of a line of the user's own."""
    record = RunRecord(task="Mine", status="failed", reason="RuntimeError: shapes", script="mine.py")
    try:
        Broken()(torch.ones(2, 3))
    except RuntimeError as error:
        record.failed_at = raised_at(error)
    return record


def resumable(status: str) -> RunRecord:
    record = RunRecord(task="captioning", status=status, reason="RuntimeError: [bold]as it is[/]")
    record.command = ["task=captioning", "hydra.run.dir=elsewhere", "resume=older", "task.data.root=/a b"]
    return record


ENDS: dict[str, tuple[Callable[[], RunRecord], str | None, dict[str, Any]]] = {
    "a run that has much to say": (eventful, "outputs/captioning/regional/2026-11-27_22-58-49", {}),
    "a profile that was asked for": (
        lambda: RunRecord(task="captioning", report={"profile": {"idle_share": 0.3, "trace": "profile/trace.json.gz"}}),
        "outputs", {},
    ),
    "all of it": (eventful, "outputs", {"full": True}),
    "a script that was interrupted": (
        lambda: RunRecord(task="Mine", status="interrupted", script="mine.py"), "of a script", {},
    ),
    "a line of the user's own": (failed, None, {}),
    **{f"{status}, with a checkpoint": (partial(resumable, status), "my run", {})
       for status in ("failed", "interrupted", "finished")},
}  # fmt: skip
"""A record, the folder of its run, and options of ``print_end``."""


def shown(folder: Path) -> Iterator[str]:
    """Called in ``folder``."""
    for number, name in enumerate(("of a script/checkpoints/epoch=0-step=20.ckpt", "my run/checkpoints/last.ckpt",
                                   "of a script/checkpoints/epoch=0-step=10.ckpt")):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.utime(folder / name, (number, number))
    for name, fields in SUMMARIES.items():
        console = Console(file=io.StringIO(), width=200)
        print_rows(console, summary(RunRecord(task="captioning", **fields)))
        yield from (f"==== {name}", *(line.rstrip() for line in printed(console).splitlines()))
    for name, (make, place, options) in ENDS.items():
        console = Console(file=io.StringIO(), width=80)
        print_end(console, make(), None if place is None else folder / place, **options)
        yield from (f"==== {name}", *(line.rstrip() for line in printed(console).splitlines()))


def text_shown(folder: Path) -> str:
    lines = "\n".join(shown(folder)) + "\n"
    return re.sub(r"\S*(test_console_view\.py):\d+", r"\1:LINE", lines)


def test_the_end_of_a_run_is_as_the_file_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change that is meant, ``python -m tests.trainer.test_console_view`` writes it; look at the difference."""
    monkeypatch.chdir(tmp_path)
    assert text_shown(tmp_path).splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_what_a_loaders_process_raised_is_shown_by_its_own_line() -> None:
    text = f'''Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "{torch.__path__[0]}/utils/data/_utils/worker.py", line 1, in _worker_loop
    data = fetcher.fetch(index)
  File "/mine/data.py", line 12, in __getitem__
ValueError: no caption'''
    assert raised_at(ValueError(text)) == "/mine/data.py:12 __getitem__"
    assert raised_at(ValueError("nobody's")) is None


class FakeTelemetry(SimpleNamespace):
    """What the view reads of a telemetry, compiling its second graph."""

    def __init__(self) -> None:
        compiler = SimpleNamespace(compiling=Compiling(2, 12, 3.2, 4.0))
        super().__init__(
            phase="checking Block",
            units=("step", "steps"),
            steps_done=0,
            meter=SimpleNamespace(steps_per_second=None, last_loss=None),
            compiler=compiler,
        )


@pytest.fixture(autouse=True)
def at_short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views look fifty times a second, and plain ones say again what goes on for a minute only."""
    monkeypatch.setattr(trainer.console, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(trainer.console, "PLAIN_SECONDS", 60)


def wait_until(console: Console, said: str) -> None:
    """Return once ``console`` shows ``said``."""
    deadline = time.monotonic() + 200
    while said not in printed(console):
        assert time.monotonic() < deadline, f"{said} was never said"
        time.sleep(0.01)


def test_plain_lines_say_that_it_is_compiling_and_then_that_it_trains(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, telemetry = StoppedClock(), cast(Any, FakeTelemetry())
    monkeypatch.setattr(trainer.console, "time", clock)
    with ProgressView(console, style="plain", total=200, telemetry=lambda: telemetry):
        wait_until(console, "compiling")
        telemetry.steps_done, telemetry.meter.steps_per_second, telemetry.meter.last_loss = 7, 12.5, 2.345
        telemetry.compiler.compiling = None
        telemetry.phase = "training"
        clock.now += 12
        wait_until(console, "training")
    compiling, training = printed(console).splitlines()
    assert compiling.startswith("compiling graph 2 of about 12, some 40 s left: ")
    assert "step 0/200 after 0 s" in compiling
    assert training.startswith("training: step 7/200 after 12 s · 12.50 steps/s · loss 2.345")


def test_the_bar_is_as_wide_as_the_terminal_and_says_what_it_counts() -> None:
    console, telemetry = Console(file=io.StringIO(), force_terminal=True, width=70), cast(Any, FakeTelemetry())
    telemetry.steps_done = 500
    with ProgressView(console, style="live", total=2000, telemetry=lambda: telemetry):
        pass
    doing, bar = re.sub(r"\x1b\[[\d?;]*[A-Za-z]", "", printed(console)).splitlines()[:2]
    assert doing.strip() == "compiling graph 2 of about 12, some 40 s left"
    assert len(bar.rstrip()) == 70
    assert re.fullmatch(r"[━╸╺ ]{50,} step 500/2000", bar.rstrip())


def test_estimates_do_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, telemetry, left = StoppedClock(), cast(Any, FakeTelemetry()), SecondsLeft()
    monkeypatch.setattr(trainer.console, "time", clock)
    shown: list[float | None] = []
    before = 0.0
    for number, takes in enumerate((4.0, 40.0, 2.0, 30.0), 1):
        for tick in range(int(takes * 2)):
            telemetry.compiler.compiling = Compiling(number, 4, tick / 2, before)
            left.look(telemetry, 100)
            shown.append(left.compiling)
            clock.now += 0.5
        before += takes
    known = [one for one in shown if one is not None]
    assert len(known) == 2 * 72, "from the second graph on"
    assert max(abs(later - former) for former, later in itertools.pairwise(known)) < 4, "for the 40 s of one graph"
    assert known[-1] < 4

    telemetry.compiler.compiling = None
    telemetry.phase, telemetry.steps_done = "training", 500  # resumed
    left, shown = SecondsLeft(), []
    for steps in [2] * 40 + [0] * 20 + [2] * 40:  # a validation of ten seconds between two steps
        left.look(telemetry, 1000)
        shown.append(left.training)
        clock.now += 0.5
        telemetry.steps_done += steps
    assert shown[:7] == [None] * 7, "no pace is known at first"
    assert shown[40] == pytest.approx(105, abs=2), "420 steps, a quarter of a second each"
    known = [one for one in shown if one is not None]
    assert max(abs(later - former) for former, later in itertools.pairwise(known)) < 4


def test_slow_first_steps_say_nothing_of_those_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, telemetry, left = StoppedClock(), cast(Any, FakeTelemetry()), SecondsLeft()
    monkeypatch.setattr(trainer.console, "time", clock)
    telemetry.compiler.compiling = None
    telemetry.phase = "training"
    for _ in range(10):  # steps of ten seconds: checks, kernels, graphs
        for tick in range(20):
            left.look(telemetry, 2010)
            clock.now += 0.5
            telemetry.steps_done += tick == 19
    for _ in range(40):  # then twenty a second
        left.look(telemetry, 2010)
        clock.now += 0.5
        telemetry.steps_done += 10
    assert left.training == pytest.approx(80, rel=0.2)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (None, ""), (3, "a few seconds left"), (13, "some 15 s left"), (42, "some 40 s left"),
        (117, "some 2 min left"), (3540, "some 59 min left"),
    ],
)  # fmt: skip
def test_seconds_left_are_said_as_roughly_as_they_are_known(seconds: float | None, says: str) -> None:
    assert seconds_left(seconds) == says


@pytest.mark.parametrize("terminal", [True, False])
def test_automatic_is_a_live_bar_on_a_terminal_and_a_line_elsewhere(terminal: bool) -> None:
    console, telemetry = Console(file=io.StringIO(), force_terminal=terminal, width=160), cast(Any, FakeTelemetry())
    with ProgressView(console, style="none", total=200, telemetry=lambda: telemetry):
        time.sleep(0.1)
    assert printed(console) == ""
    with ProgressView(console, style="auto", total=200, telemetry=lambda: telemetry):
        wait_until(console, "compiling graph 2")
    assert "0/200" in printed(console)
    assert ("\x1b[" in printed(console)) == terminal


class StoppedClock(SimpleNamespace):
    """Stands in for the view's module ``time``."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_what_lasts_a_moment_gets_no_line(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock()
    telemetry: Any = FakeTelemetry()
    monkeypatch.setattr(trainer.console, "time", clock)
    telemetry.compiler.compiling = None
    telemetry.phase = "starting"
    with ProgressView(console, style="plain", total=200, telemetry=lambda: telemetry):
        wait_until(console, "building data and model")
        telemetry.phase = "checking Block"
        time.sleep(0.1)
        telemetry.phase = "training"
        clock.now += 10
        wait_until(console, "training")
    assert [line.split(":")[0] for line in printed(console).splitlines()] == ["building data and model", "training"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        GOLDEN.write_text(text_shown(Path(made)), encoding="utf-8")
