"""What ``regional`` finds by itself and the training never calls gives way to what it calls, between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crucible import Regional, Whole
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torchs

from strategies import Program
from strategies.cuda_graph.step_capture import _Parts
from strategies.region import State
from strategies.regions import CalledModules, instead_of
from tests.promises.training import WIDTH, Module, train, vectors


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())


class OneByOne(nn.Module):
    """The layers in its blocks are called, and the blocks are not (scvi-tools)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(layers(), layers())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for layer in block:
                x = layer(x)
        return x


class ByName(nn.Module):
    """The entries of its dictionary do their work in another method, which calls what is in them."""

    class Entry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = layers(), nn.Linear(WIDTH, 1)

        def message(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale(x)

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({name: ByName.Entry() for name in ("bond", "atom")})

    def encode(self, x: Tensor) -> Tensor:
        return self.by_name["bond"].message(x) + self.by_name["atom"].message(x)


class Functional(nn.Module):
    """Its blocks hold weights, and nothing calls a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layers(), layers()])

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.linear(x, block[0].weight)  # type: ignore[index]
        return x


class Encodes(nn.Module):
    """Nothing repeats in it, and it is called by another method (gluonts, chemprop)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), OneByOne()
        self.norm = nn.LayerNorm(WIDTH)
        del self.second.blocks[1]

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)))


class Called(nn.Module):
    """Blocks as all have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layers(), layers()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Trained(Module):
    """Calls ``encode`` where the network has it, and the network at all in each ``seldom``-th step alone."""

    def __init__(self, net: nn.Module, seldom: int) -> None:
        super().__init__(net)
        self.seldom = seldom

    def loss(self, batch: Any) -> Tensor:
        if self.global_step % self.seldom != self.seldom - 1:
            return (sum(one.sum() for one in self.parameters()) * 1e-3).square()  # type: ignore[union-attr]
        encode: Any = getattr(self.net, "encode", self.net)
        return (encode(batch) - 1).square().mean()


def trained(net: type[nn.Module], strategies: list[Any], *, steps: int = 5, seldom: int = 1) -> tuple[Any, list[float]]:
    """The callback, and the weights' sums as eager leaves them."""
    seen = train(lambda: Trained(net(), seldom), strategies, data=vectors(steps))
    assert seen.ended is None, seen.end
    return seen.trainer.callbacks[-1], [float(one.detach().double().square().sum()) for one in seen.module.parameters()]


@pytest.mark.parametrize(
    ("net", "strategy", "taken", "said"),
    [
        (OneByOne, Regional, ["net"], "net.blocks.0, net.blocks.1 are never called as a module; compiling"),
        (
            ByName,
            Regional,
            ["net.by_name.bond.inner", "net.by_name.atom.inner"],
            "net.by_name.bond, net.by_name.atom are never called as a module; compiling",
        ),
        (Encodes, Regional, ["net.first", "net.second"], "net is never called as a module; compiling"),
        (Encodes, Whole, ["net.first", "net.second"], "net is never called as a module; compiling"),
    ],
)
def test_what_is_never_called_gives_way_to_what_is(net: Any, strategy: Any, taken: list[str], said: str) -> None:
    compile_, weights = trained(net, [strategy(backend="eager")])
    _, expected = trained(net, [])
    assert weights == pytest.approx(expected, rel=1e-5)
    program, record = compile_.program, compile_.record
    assert [(one.path, one.state) for one in program.regions] == [(path, State.COMPILED) for path in taken]
    assert (record.regions, record.regions_compiled, record.eager_parts) == (len(taken), len(taken), {})
    (line,) = [note for note in record.notes if "never called" in note]
    assert line.startswith(f"{strategy.name}: {said}")
    assert line.endswith(f"what is called instead: {', '.join(taken)}")
    assert not torchs._global_forward_hooks
    assert not torchs._global_forward_pre_hooks


def test_blocks_that_are_called_stay_and_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.guards.first_calls.CalledModules", None)
    compile_, _ = trained(Called, [Regional(backend="eager")])
    assert [one.path for one in compile_.program.regions] == ["net.blocks.0", "net.blocks.1"]
    assert compile_.program.found is None


def test_what_is_called_seldom_stays() -> None:
    compile_, _ = trained(Called, [Regional(backend="eager")], steps=9, seldom=4)
    assert [(one.path, one.state) for one in compile_.program.regions] == [
        (f"net.blocks.{place}", State.COMPILED) for place in (0, 1)
    ]


def test_where_no_module_is_called_all_runs_eager_and_is_named() -> None:
    compile_, weights = trained(Functional, [Regional(backend="eager")], steps=11)
    assert weights == trained(Functional, [], steps=11)[1]
    assert set(compile_.record.eager_parts) == {"net.blocks.0", "net.blocks.1"}


def test_blocks_that_were_named_stay() -> None:
    compile_, _ = trained(OneByOne, [Regional(backend="eager", blocks=["net.blocks"])])
    assert [one.path for one in compile_.program.regions] == ["net.blocks.0", "net.blocks.1"]


def test_a_module_around_regions_that_are_called_does_not_take_their_place() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.left = Called(), OneByOne()

        def forward(self, x: Tensor) -> Tensor:
            return self.left(self.called(x))

    module = nn.ModuleDict({"net": Both()})
    program = Program(module=module)
    Regional(backend="eager").apply(program)
    with CalledModules(program) as called:
        module["net"](torch.ones(2, WIDTH))
    assert called.outermost == ["net"]
    assert instead_of(program, program.found.paths, called) == ([], [])


def test_no_step_is_captured_before_it_is_known() -> None:
    program = Program(module=nn.ModuleDict({"net": OneByOne()}))
    Regional(backend="eager").apply(program)
    parts = _Parts(SimpleNamespace(_program=program, _optimizer=None))  # type: ignore[arg-type]
    assert not parts.ready()
    program.found = None
    assert parts.ready(), "of regions that are not called a graph knows nothing"
