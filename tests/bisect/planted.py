"""Planted cases: a tree of small modules, and backends that go wrong at one operator of one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

WIDTH = 8
SLOW_SECONDS = 0.05


class Plain(nn.Module):
    """Two layers and nothing wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Sine(nn.Module):
    """Holds the only sine of a network."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Cosine(nn.Module):
    """Holds the only cosine of a network."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x)


class Breaking(nn.Module):
    """Breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # planted
        return x * 2


class Middle(nn.Module):
    """A module deep inside, between two that are fine."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class BreaksBetween(Middle):
    """Breaks the graph between two submodules."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.before(x))
        torch._dynamo.graph_break()  # planted
        return self.after(x)


class Net(nn.Module):
    """Blocks in a list, then a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def calls(graph: GraphModule, name: str) -> bool:
    """Whether a graph calls an operator with ``name`` in its name."""
    return any(node.op in ("call_function", "call_method") and name in str(node.target) for node in graph.graph.nodes)


Compiled = Callable[..., Any]


@register_backend
def planted_wrong_sine(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Computes a hundredth too much wherever there is a sine, in a graph of its own or in a larger one."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.sin:
            node.target = wrong_sine
    graph.recompile()
    return graph.forward


def wrong_sine(x: Tensor) -> Tensor:
    return torch.sin(x) * 1.01


@register_backend
def planted_slow_sine(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    def slow(*args: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return graph.forward(*args)

    return slow if calls(graph, "sin") else graph.forward


def _as_it_is(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    return make_boxed_func(graph.forward)


def raise_at_cosine(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    if calls(graph, "cos"):  # what a sine is in the backward
        raise ValueError("no kernel for a cosine")
    return make_boxed_func(graph.forward)


planted_backward = aot_autograd(fw_compiler=_as_it_is, bw_compiler=raise_at_cosine)
register_backend(planted_backward, name="planted_backward")


@register_backend
def planted_together(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Fails once a sine and a cosine have been compiled in one program, in one graph or in two."""
    seen = planted_seen
    seen.update(name for name in ("sin", "cos") if calls(graph, name))
    if len(seen) == 2:
        raise ValueError("a sine and a cosine")
    return graph.forward


planted_seen: set[str] = set()


@register_backend
def planted_symbols(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Fails at symbolic sizes."""
    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise ValueError("a symbolic size")
    return graph.forward


@register_backend
def planted_seven_rows(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Fails at batches of seven."""
    if any(isinstance(value, Tensor) and value.shape[:1] == (7,) for value in inputs):
        raise ValueError("seven rows")
    return graph.forward


@register_backend
def planted_failing(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    raise ValueError("nothing compiles")


@register_backend
def planted_crash(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Kills the process at a sine, as a bug in a compiler does."""
    if calls(graph, "sin"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return graph.forward
