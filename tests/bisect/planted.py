"""Planted cases: a tree of small modules, and backends that go wrong at one operator of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch.fx import GraphModule
from torch.utils.data import DataLoader

WIDTH = 8


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


class Middle(nn.Module):
    """A module deep inside, between two that are fine."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class SineBetween(Middle):
    """Takes a sine between two submodules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.sin(self.inner(self.before(x))))


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


def scaled(graph: GraphModule) -> Compiled:
    """Everything that the graph returns, a hundredth too large."""
    return lambda *args: tuple(value * 1.01 for value in graph.forward(*args))


@register_backend
def planted_together(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Goes wrong where a sine and a cosine are in one graph."""
    return scaled(graph) if calls(graph, "sin") and calls(graph, "cos") else graph.forward


@register_backend
def planted_seven_rows(graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Goes wrong at batches of seven."""
    seven = any(isinstance(value, Tensor) and value.shape[:1] == (7,) for value in inputs)
    return scaled(graph) if seven else graph.forward


class Trained(L.LightningModule):
    """Trains one network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(*rows: int) -> DataLoader[Any]:
    """A batch for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, WIDTH, generator=generator) for count in rows]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
