"""How faults are planted: into graphs that a compiler was given, into their gradients, and into an optimizer's step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from strategies import Program, Regional, Stage, Strategy
from strategies.optimizer.step import replace_step

_NUMBERS = itertools.count()


@dataclass
class Call:
    """One call of a compiled graph."""

    graph: GraphModule
    inputs: list[Any]
    names: list[str]
    number: int
    """Calls of all graphs of the backend before this one."""
    training: bool
    memory: dict[str, Any]
    """Whatever a fault wants to remember from call to call."""

    def run(self) -> list[Any]:
        return list(self.graph.forward(*self.inputs))

    def at(self, part: str) -> list[int]:
        """Places of the inputs whose names hold ``part``."""
        return [place for place, name in enumerate(self.names) if part in name]

    @property
    def length(self) -> int:
        """Positions of the batch."""
        return int(next(one for one in self.inputs if isinstance(one, Tensor) and one.dim() == 3).shape[1])

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(next(one for one in self.inputs if isinstance(one, Tensor) and one.dim() == 3).shape[0])


Fault = Callable[[Call], list[Any]]
Edit = Callable[[GraphModule], None]


def regional(fault: Fault = Call.run, edit: Edit | None = None) -> Strategy:
    """``compile=regional`` whose compiled calls go through ``fault``, and whose graphs are changed by ``edit``."""
    calls = itertools.count()
    memory: dict[str, Any] = {}

    def compiler(graph: GraphModule, _: Any) -> Callable[..., Any]:
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        training = torch.is_grad_enabled()
        if edit is not None:
            edit(graph)
            graph.recompile()

        def call(*inputs: Any) -> list[Any]:
            return fault(Call(graph, list(inputs), names, next(calls), training, memory))

        return call

    name = f"planted_{next(_NUMBERS)}"
    torch._dynamo.register_backend(compiler, name=name)
    return Regional(backend=name)


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
        for part in parts:
            for place in call.at(part):
                call.inputs[place] = _Changed.apply(call.inputs[place], change)
        return call.run()

    return fault


def floating(outputs: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """The outputs with the floating-point ones changed."""
    return [change(one) if isinstance(one, Tensor) and one.is_floating_point() else one for one in outputs]


@dataclass(kw_only=True, slots=True)
class FaultyStep(Strategy):
    """``compile=optimizer`` with a wrong step."""

    name: ClassVar[str] = "faulty_step"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    step: Callable[[Any], None]

    def begin(self, program: Program) -> None:
        faulty = _Faulty(program.optimizers[0], self.step)
        replace_step(program.optimizers[0], lambda _: faulty())

    def is_exact(self, program: Program) -> bool:
        return True  # as the one that it stands for says


@dataclass
class _Faulty:
    optimizer: Any
    change: Callable[[Any], None]
    steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> None:
        self.change(self)
        self.steps += 1

    def own(self, **groups: Any) -> None:
        """torch's own step, with hyperparameters changed meanwhile."""
        before = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(groups)
        type(self.optimizer).step(self.optimizer)
        for group, values in zip(self.optimizer.param_groups, before, strict=True):
            group.update(values)

    @property
    def parameters(self) -> list[Tensor]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]
