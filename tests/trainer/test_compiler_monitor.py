"""What the compiler does is counted, and told while the run goes on: once, in one line with its line of code."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from strategies import Regional, Whole
from tests.trainer.lightning_modules import Blocks, fit, quiet_trainer
from trainer.callback import Compile
from trainer.process import process_settings
from trainer.settings import TrainerConfig
from trainer.telemetry import compiler
from trainer.telemetry.compiler import MAX_LINES, CompilerMonitor, line_about
from trainer.telemetry.record import Event

HERE = str(Path(__file__).resolve())


@pytest.fixture
def watch() -> Iterator[CompilerMonitor]:
    """A watch at step 3."""
    watch = CompilerMonitor()
    watch.start()
    watch.step = 3
    yield watch
    watch.stop()


@pytest.mark.parametrize(("widths", "graphs"), [((8, 8, 8), 1), ((8, 8, 16), 2)], ids=["alike", "of two widths"])
def test_graphs_are_counted_before_they_are_compiled(
    widths: tuple[int, ...], graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[int, int]] = []
    expect = CompilerMonitor.expect

    def counted(self: CompilerMonitor, graphs: int) -> None:
        known.append((graphs, self.compilations))
        expect(self, graphs)

    monkeypatch.setattr(CompilerMonitor, "expect", counted)
    compile_ = Compile([Regional(backend="eager")], save=False, verbose=False)
    trainer = quiet_trainer(max_steps=3, callbacks=[compile_], default_root_dir=tmp_path)
    trainer.fit(OfWidths(widths), torch.randn(6, 2, 8))
    assert known == [(graphs, 0)]
    assert compile_.telemetry.compiler.compilations == graphs


class OfWidths(L.LightningModule):
    """Blocks that keep the width of what they are given, each with so many hidden features."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        blocks = (nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in widths)
        self.blocks = nn.ModuleList(blocks)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def new(watch: CompilerMonitor) -> list[Event]:
    """What it has seen since the last call."""
    watch.collect()
    found, watch.unreported = watch.unreported, []
    return found


def line_of(function: Callable[..., Any], text: str) -> int:
    """Line of the file on which ``text`` stands in ``function``."""
    lines, first = inspect.getsourcelines(function)
    return next(first + offset for offset, line in enumerate(lines) if text in line)


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


def doubles(x: Tensor) -> Tensor:
    return x * 2


def test_figures_count_from_the_start_of_the_watch_to_its_stop(watch: CompilerMonitor) -> None:
    torch.compile(branches, backend="eager")(torch.ones(3))
    watch.collect()
    watch.stop()
    later = CompilerMonitor()
    later.start()
    figures, compiled = later.figures(), watch.compilations
    assert (figures.graphs, figures.graph_breaks, figures.recompiles, later.events) == (0, 0, 0, [])
    torch._dynamo.reset()  # which takes the callbacks away
    later.stop()
    torch.compile(doubles, backend="eager")(torch.ones(3))
    assert (watch.compilations, later.compilations) == (compiled, 0)


def test_what_is_compiled_is_told_by_run(watch: CompilerMonitor) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    module = Doubling()
    module.compile(backend="eager")
    module(torch.ones(3))
    assert watch.compiled(module)
    later = CompilerMonitor()
    later.start()
    module(torch.ones(3))
    assert not later.compiled(module), "of which this run knows nothing"
    assert later.compiled(module, held=True)
    assert later.compiled(Doubling(), splits=True), "what it calls may be what was compiled before"
    later.stop()


def test_compiled_code_is_told_from_code_that_stayed_eager(watch: CompilerMonitor) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return doubles(x)

    class Looping(nn.Module):  # a break in its loop: torch leaves this frame out, and compiles what it calls
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = doubles(x)
                x.sum().item()
            return x

    class Eager(Doubling):
        pass

    modules = [Doubling(), Looping(), Eager()]
    for module in modules[:2]:
        torch._dynamo.reset_code(doubles.__code__)
        module.compile(backend="eager")
        module(torch.ones(3))
    modules[2](torch.ones(3))
    assert [watch.compiled(module) for module in modules] == [True, True, False]


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
    assert f'test_compiler_monitor.py:{number} forward `print("here")`: ' in line
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
