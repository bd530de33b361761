"""What a person sees: a summary that never shows a figure that does not exist, and lines that say it is compiling."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

import trainer.console
from trainer.console import ProgressView, print_end, summary
from trainer.telemetry.record import Event, RunRecord

COMPILED: dict[str, Any] = {"label": "regional", "strategies": [{"name": "regional"}]}


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    """A console that is no terminal."""
    return Console(file=io.StringIO(), width=120)


def test_figures_that_do_not_exist_have_no_rows() -> None:
    assert set(summary(RunRecord(task="captioning", **COMPILED))) == {"strategies"}
    assert set(summary(RunRecord(task="captioning"))) == {"strategies", "compile"}


def test_small_and_large_figures_have_no_exponent_and_are_not_zero() -> None:
    record = RunRecord(task="micro", steps=12_345, steady_steps=12_340, steady_steps_per_second=0.004)
    record.model_flops_utilization_measured_peak, record.steady_step_seconds_median = 0.4567, 2.08
    record.steady_step_seconds_p95, record.joules_per_sample = 3e-7, 0.00012
    record.warmup_seconds, record.warmup_steps, record.final_loss = 1234.5, 10_000, 1e-6
    rows = summary(record)
    assert rows["optimizer steps"] == "12,345"
    assert rows["steady step"] == "median 2,080 ms, p95 0.00030 ms", "one unit for all of them"
    assert rows["steps"] == "0.0040 /s (12,340 steady ones)"
    assert rows["utilization"] == "45.7% of the peak measured when the run began"
    assert rows["energy"] == "0.00012 J/sample"
    assert rows["warm-up"] == "1,234 s in 10,000 steps"
    assert rows["final loss"] == "0.0000010"


def test_eager_has_no_rows_about_compiling() -> None:
    rows = summary(RunRecord(task="captioning", steps=4))
    assert rows["compile"] == "nothing to compile"
    assert "regions compiled" not in rows
    assert "graphs / breaks / recompiles" not in rows
    assert rows["optimizer steps"] == "4"


def test_the_rows_of_a_compiled_run_say_what_it_cost() -> None:
    record = RunRecord(task="captioning", compile_seconds=12.34, graphs=5, graph_breaks=0, recompiles=2, **COMPILED)
    record.regions = record.regions_compiled = 7
    record.cache, record.cache_hits, record.cache_misses = "mixed", 3, 2
    record.skipped_items = {"caption is longer than pad_to": 4, "image does not decode": 0}
    record.final_metrics = {"val/loss": 1.5}
    rows = summary(record)
    assert rows["compile"] == "12.3 s (mixed start: 3 hits, 2 misses)"
    assert rows["regions compiled"] == "7 of 7"
    assert rows["graphs / breaks / recompiles"] == "5 / 0 / 2"
    assert rows["skipped items"] == "4 caption is longer than pad_to"
    assert rows["val/loss"] == "1.5000"
    record.regions, record.events = 0, [Event(kind="fallback", reason="no formula")]
    rows = summary(record)
    assert "regions compiled" not in rows
    assert rows["ran eager instead"] == "no formula"
    record.status = "failed"
    assert "ran eager instead" not in summary(record)


def test_parity_is_the_first_checks_with_what_came_nearest_to_its_tolerance() -> None:
    worst = {
        "output": {"what": "0", "difference": 8e-8, "tolerance": 1e-5},
        "gradient": {"what": "weight", "difference": 4e-6, "tolerance": 1e-5},
    }
    facts = {"verdict": "passed", "checks": 7, "how": ["exact"], "worst": worst}
    record = RunRecord(task="captioning", report={"parity": facts}, **COMPILED)
    assert summary(record)["parity with eager"] == "passed (7 checks; gradient 4.0e-06 apart, tolerance 1.0e-05)"
    facts["how"] = ["exact", "seeds"]
    assert summary(record)["parity with eager"].startswith("passed (7 checks, means of several draws; gradient ")
    facts["worst"] = {}
    assert summary(record)["parity with eager"] == "passed"


@pytest.mark.parametrize("status", ["failed", "interrupted", "finished"])
def test_how_to_go_on_is_said_when_there_is_a_checkpoint(
    status: str, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "my run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "last.ckpt").touch()
    record = RunRecord(task="captioning", status=status, reason="RuntimeError: [bold]as it is[/]")
    record.command = ["task=captioning", "hydra.run.dir=elsewhere", "resume=older", "task.data.root=/a b"]
    print_end(console, record, run_dir)
    assert f"captioning · eager · {status}" in printed(console)
    said = printed(console).splitlines()
    expected = "continue with: python -m trainer task=captioning 'task.data.root=/a b' 'resume=my run'"
    assert (expected in said) == (status != "finished")
    assert ("failed: RuntimeError: [bold]as it is[/]" in said) == (status == "failed")
    assert "tensorboard --logdir 'my run'" in said


class FakeTelemetry(SimpleNamespace):
    """What the view reads of a telemetry, compiling its second graph."""

    def __init__(self) -> None:
        compiler = SimpleNamespace(compiling_seconds=3.2, compilations=2, compile_seconds=4.0)
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


def test_plain_lines_say_that_it_is_compiling_and_then_that_it_trains(console: Console) -> None:
    telemetry: Any = FakeTelemetry()
    with ProgressView(console, style="plain", total=200, telemetry=lambda: telemetry):
        wait_until(console, "compiling")
        telemetry.steps_done, telemetry.meter.steps_per_second, telemetry.meter.last_loss = 7, 12.5, 2.345
        telemetry.compiler.compiling_seconds, telemetry.phase = None, "training"
        wait_until(console, "training")
    compiling, training = printed(console).splitlines()
    assert compiling.startswith("compiling graph 2 (7 s so far)"), "and never what it will be in all"
    assert "step 0/200" in compiling
    assert training.startswith("training: step 7/200 12.50 steps/s · loss 2.345")


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_line_fits_its_terminal(width: int) -> None:
    console, telemetry = Console(file=io.StringIO(), force_terminal=True, width=width), cast(Any, FakeTelemetry())
    with ProgressView(console, style="auto", total=2000, telemetry=lambda: telemetry):
        pass
    shown = cast(io.StringIO, console.file).getvalue()
    assert "/2000" in shown
    assert "…" not in shown


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
    telemetry.compiler.compiling_seconds, telemetry.phase = None, "starting"
    with ProgressView(console, style="plain", total=200, telemetry=lambda: telemetry):
        wait_until(console, "building data and model")
        telemetry.phase = "checking Block"
        time.sleep(0.1)
        telemetry.phase = "training"
        clock.now += 10
        wait_until(console, "training")
    assert [line.split(":")[0] for line in printed(console).splitlines()] == ["building data and model", "training"]
