"""What is otherwise silent is told while the run goes on: once, in one line with its line of code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies import Regional, Whole
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.process import process_settings
from trainer.settings import TrainerConfig
from trainer.telemetry import compiler
from trainer.telemetry.compiler import MAX_LINES, CompilerMonitor, line_about
from trainer.telemetry.record import Event

HERE = str(Path(__file__).resolve())


def recompile(**changes: Any) -> Event:
    return Event(**{"kind": "recompile", "reason": "0/1: size", "location": "model.py:3 forward", "step": 9, **changes})


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(("compile: ", "step "))]


class Prints(torch.nn.Module):
    """A block that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.linear(x_BD)
        print("here")  # the break
        return x_BD + y_BD.relu()


class Printing(Blocks):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Prints() for _ in range(3))


def test_a_graph_break_is_told_once_with_its_line_of_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_ = Compile([Regional(backend="eager", fullgraph=False)], blocks=["layers"], parity="off")
    fit(Printing(), tmp_path, [compile_])
    number = next(i for i, line in enumerate(Path(HERE).read_text().splitlines(), 1) if "# the break" in line)
    (line,) = lines(capsys)
    assert line.startswith("compile: graph break in step 1 at ")
    assert f'test_compare_progress.py:{number} forward `print("here")`: ' in line
    assert compile_.record.graph_breaks


class Widens(Blocks):
    """Its fifth step is of another shape."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part[: 2 if batch_idx == 4 else 4] for part in batch], batch_idx)


@pytest.mark.parametrize(("warmup_steps", "told"), [(2, 1), (5, 0)])
def test_a_recompile_is_told_after_the_warmup_only(
    warmup_steps: int, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_ = Compile([Regional(backend="eager")], blocks=["layers"], parity="off", warmup_steps=warmup_steps)
    fit(Widens(), tmp_path, [compile_])
    assert compile_.record.recompiles
    said = lines(capsys)
    assert len(said) == told
    assert all(line.startswith("compile: compiled again in step 5 at ") for line in said)
    assert all("size mismatch at index 0. expected 4, actual 2" in line for line in said)


@pytest.fixture
def monitor() -> Iterator[CompilerMonitor]:
    """One that may report as much as a run does."""
    monitor = CompilerMonitor()
    monitor.start()
    monitor.lines_left = MAX_LINES
    yield monitor
    monitor.stop()


def test_what_is_told_and_what_is_not(monitor: CompilerMonitor, capsys: pytest.CaptureFixture[str]) -> None:
    monitor.unreported += [recompile(), recompile(reason="0/2: size")]
    monitor.report(warm=True)
    monitor.unreported += [recompile(location="other.py:1 f"), Event(kind="cudagraph_skip", reason="x")]
    monitor.report(warm=False)
    monitor.unreported += [recompile(location="third.py:1 f", phase="validating")]
    monitor.report(warm=True)
    assert lines(capsys) == ["compile: compiled again in step 9 at model.py:3 forward: 0/1: size"]
    monitor.reports_recompiles = False
    monitor.unreported += [recompile(location="fourth.py:1 f"), Event(kind="fallback", reason="limit\nmore")]
    monitor.report(warm=True)
    assert lines(capsys) == ["compile: not compiled: limit"]
    monitor.lines_left = 0
    monitor.unreported += [Event(kind="fallback", reason="another")]
    monitor.report(warm=True)
    assert lines(capsys) == []


def test_a_run_that_says_too_much_says_that_it_stops(
    monitor: CompilerMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.unreported += [recompile(location=f"model.py:{line} f") for line in range(2 * MAX_LINES)]
    monitor.report(warm=True)
    said = lines(capsys)
    assert len(said) == MAX_LINES
    assert said[-1].endswith("(more of the like is in the record and on TensorBoard's pages only)")


def test_a_line_about_code_that_cannot_be_read_leaves_it_out() -> None:
    event = Event(kind="graph_break", reason="\n  because\nmore", location="<string>:1 f")
    assert line_about(event) == "compile: graph break at <string>:1 f: because"
    event.location = "<string>:2 torch_dynamo_resume_in_f_at_1"
    event.reason = "Failed to trace builtin operator\n  Explanation: Dynamo does not know print.\n  Hint: none"
    assert line_about(event) == "compile: graph break at <string>:2 f: Dynamo does not know print."


def test_a_warning_of_ours_is_one_line_and_those_of_others_say_where() -> None:
    before = warnings.formatwarning
    with process_settings(TrainerConfig()):
        assert warnings.formatwarning("slow", UserWarning, str(compiler.__file__), 1) == "warning: slow\n"
        assert "UserWarning: slow" in warnings.formatwarning("slow", UserWarning, __file__, 1)
    assert warnings.formatwarning is before


def test_a_healthy_run_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Blocks(), tmp_path, [Compile([Whole(backend="eager")], whole=["layers.0"], parity="off")])
    assert lines(capsys) == []
