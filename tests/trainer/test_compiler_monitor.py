"""What the compiler is seen to do, on planted cases: breaks, recompiles and failures with reason and source line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from strategies import Regional
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.telemetry.compiler import CompilerMonitor
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
