"""How faults are planted: into compiled graphs, their gradients and what they write, from a step of the training on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from crucible import Optimizer, Regional, Strategy, Whole
from torch import Tensor, nn
from torch.fx import GraphModule

WIDTH, LENGTH, ROWS = 16, 8, 8
_NUMBERS = itertools.count()


class Clock(L.Callback):
    """Which optimizer step the training is in: one more than are done."""

    step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Clock.step = trainer.global_step + 1

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        Clock.step = trainer.global_step + 1


@dataclass
class Call:
    """One call of a compiled graph."""

    graph: GraphModule
    faulty: GraphModule
    """The same graph, changed."""
    inputs: list[Any]
    names: list[str]
    training: bool
    memory: dict[Any, Any] = field(default_factory=dict)
    """Whatever a fault wants to remember from call to call."""

    def run(self) -> list[Any]:
        return list(self.graph.forward(*self.inputs))

    def run_faulty(self) -> list[Any]:
        return list(self.faulty.forward(*self.inputs))

    def at(self, part: str) -> list[int]:
        """Places of the inputs whose names hold ``part``."""
        return [place for place, name in enumerate(self.names) if part in name]

    @property
    def batch(self) -> torch.Size:
        """Shape of the region's input."""
        return next(one for one in self.inputs if isinstance(one, Tensor) and one.dim() == 3).shape


Fault = Callable[[Call], list[Any]]
Edit = Callable[[GraphModule], None]


def backend(fault: Fault = Call.run_faulty, edit: Edit | None = None, *, begins: int = 1, anew: bool = False) -> str:
    """The name of a compiler whose graphs go through ``fault``, or are changed by ``edit``, from a step on; with
    ``anew`` those alone that it makes from that step on."""
    memory: dict[Any, Any] = {}

    def compiler(graph: GraphModule, _: Any) -> Callable[..., Any]:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        training = torch.is_grad_enabled()
        if anew and Clock.step < begins:
            return graph.forward
        faulty = copy.deepcopy(graph)
        if edit is not None:
            edit(faulty)
            faulty.recompile()

        def call(*inputs: Any) -> Any:
            if Clock.step < begins:
                return graph.forward(*inputs)
            return fault(Call(graph, faulty, list(inputs), names, training, memory))

        return call

    name = f"planted_{next(_NUMBERS)}"
    torch._dynamo.register_backend(compiler, name=name)
    return name


def regional(
    fault: Fault = Call.run_faulty, edit: Edit | None = None, *, begins: int = 1, anew: bool = False
) -> list[Strategy]:
    """``Regional`` by such a compiler."""
    return [Regional(backend=backend(fault, edit, begins=begins, anew=anew))]


def whole(
    fault: Fault = Call.run_faulty, edit: Edit | None = None, *, begins: int = 1, anew: bool = False
) -> list[Strategy]:
    """``Whole`` by such a compiler."""
    return [Whole(backend=backend(fault, edit, begins=begins, anew=anew))]


def optimizer(fault: Fault, *, begins: int = 1) -> list[Strategy]:
    """``Optimizer`` by such a compiler."""
    return [Optimizer(backend=backend(fault, begins=begins))]


def nodes(graph: GraphModule, function: str) -> list[Any]:
    """Calls of the function of that name."""
    return [node for node in graph.graph.nodes if function in str(node.target) or function in node.name]


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


def gradient(change: Callable[[Tensor], Tensor], *parts: str) -> Fault:
    """The gradients of inputs whose names hold one of ``parts`` come out changed."""

    def fault(call: Call) -> list[Any]:
        for place in dict.fromkeys(place for part in parts for place in call.at(part)):
            if isinstance(one := call.inputs[place], Tensor) and one.requires_grad:
                call.inputs[place] = _Changed.apply(one, change)
        return call.run()

    return fault


def stale_gradient(part: str) -> Fault:
    """The gradients of inputs whose names hold ``part`` are those of the call before."""

    def fault(call: Call) -> list[Any]:
        def change(one: Tensor) -> Tensor:
            before = call.memory.get("gradient", one)
            call.memory["gradient"] = one.clone()
            return before

        return gradient(change, part)(call)

    return fault


def swapped(name: str, function: Callable[..., Any]) -> Edit:
    """The graph calls ``function`` where it called what is named so."""

    def edit(graph: GraphModule) -> None:
        for node in nodes(graph, name):
            if node.op == "call_function":
                node.target = function

    return edit


def floating(outputs: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """The outputs with the floating-point ones changed."""
    return [change(one) if isinstance(one, Tensor) and one.is_floating_point() else one for one in outputs]


def written(change: Callable[[Tensor, Tensor, int], Any], part: str = "") -> Fault:
    """What a graph writes into its inputs is changed: given the tensor, what it was before, and its number."""

    def fault(call: Call) -> list[Any]:
        places = [
            place for place in call.at(part) if isinstance(one := call.inputs[place], Tensor) and (True) and one.numel()
        ]
        before = [call.inputs[place].detach().clone() for place in places]
        out = call.run()
        number = 0
        for place, old in zip(places, before, strict=True):
            now = call.inputs[place].detach()
            if now.shape == old.shape and not torch.equal(now, old):
                change(now.data, old, number)  # behind autograd's back, as a kernel does
                number += 1
        return out

    return fault


class Block(nn.Module):
    """Attention and a hidden layer, each on top of what comes in. x_BTD: batch, positions, width."""

    scale = 1
    """What the hidden layer's results are multiplied by: a number that only a guard knows."""

    def __init__(self, dropout: float, statistics: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH) if statistics else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x_BTD)).chunk(3, dim=-1)
        x_BTD = x_BTD + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        hidden = nn.functional.gelu(self.up(x_BTD))
        if self.statistics is not None:
            hidden = self.statistics(hidden.flatten(0, 1)).view_as(hidden)
        if self.scale != 1:
            hidden = hidden * self.scale
        return x_BTD + self.dropout(hidden)


class Small(L.LightningModule):
    """Two blocks between a stem and a head: the module that faults are planted into."""

    def __init__(
        self, *, dropout: float = 0.0, statistics: bool = False, sgd: bool = False, scaled_from: int | None = None
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout, statistics) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self._sgd = sgd
        self._scaled_from = scaled_from

    def loss(self, batch: Any) -> Tensor:
        x_BTD, target_BT1 = batch
        x_BTD = self.stem(x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return nn.functional.mse_loss(self.head(x_BTD), target_BT1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self._scaled_from == self.global_step + 1:
            for layer in self.layers:
                layer.scale = 2
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self._sgd:
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(count: int, lengths: Sequence[int] = (LENGTH,), rows: Sequence[int] = (ROWS,)) -> list[Any]:
    """As many batches, whose lengths and rows come in turns."""
    made = []
    for number in range(count):
        shape = rows[number % len(rows)], lengths[number % len(lengths)]
        drawn = torch.Generator().manual_seed(number)
        made.append([torch.randn(*shape, WIDTH, generator=drawn), torch.randn(*shape, 1, generator=drawn)])
    return made
