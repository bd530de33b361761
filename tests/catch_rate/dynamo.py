"""Faults of Dynamo: what it traces is not what Python does, or a graph is used again where it no longer holds."""

from __future__ import annotations

import random
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.catch_rate.case import DYNAMO, Block, case
from tests.promises.training import WIDTH

LATER: dict[str, Any] = {"begins": 5, "steps": 12}


# ---- custom functions ------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left * right + left

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, right = ctx.saved_tensors
        return gradient * (right + 1), gradient * left


@case("one tensor twice into an autograd.Function", "gradient", DYNAMO, 183604, reported="2.11")
def twice_given(h: Tensor) -> Tensor:
    return _Product.apply(h, h)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x @ weight
        out += x
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() + gradient, x.t() @ gradient


@case("an autograd.Function that writes to its result in place", "gradient", DYNAMO, 180642, 184113, reported="2.11")
class WrittenInPlace(Block):
    holds: ClassVar = {"weight": lambda: nn.Parameter(torch.eye(WIDTH) * 0.5)}

    def mix(self, h: Tensor) -> Tensor:
        return _InPlace.apply(h, self.weight)


class _Straight(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 0.5


@case("torch.func.grad of a custom backward", "loss", DYNAMO, 193279, reported="to 2.14")
def func_grad(h: Tensor) -> Tensor:
    slope = torch.func.grad(lambda one: _Straight.apply(one).sum())(h.detach())
    return h * slope


class _Tangent(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_forward(*inputs)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 0.5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 0.5


@case("torch.func.jvp of a custom jvp", "loss", DYNAMO, 192985, reported="to 2.14")
def func_jvp(h: Tensor) -> Tensor:
    at = h.detach()
    return h * torch.func.jvp(_Tangent.apply, (at,), (torch.ones_like(at),))[1]


# ---- what Python does ------------------------------------------------------------------------------------------------


@case("a list of the class that the forward appends to", "loss", DYNAMO, 169253, reported="2.9, open")
class ListOfTheClass(Block):
    penalties: ClassVar[list[Tensor]] = []

    def mix(self, h: Tensor) -> Tensor:
        ListOfTheClass.penalties.append(h.square().mean())
        return h

    def loss(self, module: Any, batch: Any) -> Tensor:
        self.penalties.clear()
        loss = super().loss(module, batch)
        return loss + 0.5 * sum(self.penalties, torch.zeros(()))


@case("a list that a method of a local class appends to", "other state", DYNAMO, 197896, reported="2.14, open")
class LocalClass(Block):
    calls: ClassVar[list[int]] = []

    def mix(self, h: Tensor) -> Tensor:
        calls = LocalClass.calls

        class Counter:
            def count(self) -> None:
                calls.append(1)

        Counter().count()
        return h

    def prepare(self) -> None:
        self.calls.clear()

    def observed(self) -> list[float]:
        return [float(len(self.calls))]


@case("a list that grows while it is iterated over", "loss", DYNAMO, 175855, reported="2.10")
def growing_list(h: Tensor) -> Tensor:
    values = [h]

    def grown() -> Iterator[Tensor]:
        for one in values:
            if len(values) < 3:
                values.append(one * 0.5)
            yield one

    return torch.stack(list(grown())).sum(0)


@case("a list that random.shuffle orders", "loss", DYNAMO, 197085, reported="2.14, open", steps=12)
def shuffled(h: Tensor) -> Tensor:
    order = list(range(WIDTH))
    random.shuffle(order)
    return h[:, order]


@case("what random.sample takes", "loss", DYNAMO, 197085, reported="2.14, open", steps=12)
def sampled(h: Tensor) -> Tensor:
    taken = random.sample(range(WIDTH), WIDTH // 2)
    return h[:, taken].sum(1, keepdim=True) * 0.1


@case("a random.Random of the module's own", "loss", DYNAMO, 145445, 196437, reported="2.6, open", steps=12)
class OwnRandom(Block):
    holds: ClassVar = {"random": lambda: random.Random(0)}

    def mix(self, h: Tensor) -> Tensor:
        return h * self.random.random()


@case("numbers of numpy.random", "random numbers", DYNAMO, 116746, reported="2.2, open", steps=12)
def numpy_random(h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.random.uniform(0.0, 1.0, WIDTH)).float()


@case("a forward that is replaced within the forward", "loss", DYNAMO, 167400, reported="2.9")
class PatchedWithin(Block):
    holds: ClassVar = {"act": lambda: nn.Tanh()}

    def mix(self, h: Tensor) -> Tensor:
        self.act.forward = lambda one: one * h
        return self.act(h)


@case("move_to_end of an OrderedDict", "other state", DYNAMO, 198189, reported="2.14, open")
class Recent(Block):
    holds: ClassVar = {"recent": lambda: OrderedDict(a=1, b=2, c=3)}

    def mix(self, h: Tensor) -> Tensor:
        self.recent.move_to_end(next(iter(self.recent)))
        return h

    def observed(self) -> list[float]:
        return [float(list(self.recent).index("a"))]


@case("requires_grad after detach_()", "gradient", DYNAMO, 176854, reported="2.10")
def detached(h: Tensor) -> Tensor:
    y = h * 0.5
    y.detach_()
    return h + y if y.requires_grad else h * h + y


@case("a generator's body runs before the context it is read in", "gradient", DYNAMO, 134030, reported="2.5")
def lazy_generator(h: Tensor) -> Tensor:
    def made() -> Iterator[Tensor]:
        yield h * h

    values = made()
    with torch.no_grad():
        still = next(values)
    return h + still


@case("a hook on a tensor within the forward", "gradient", DYNAMO, 91468, reported="2.0, open")
def tensor_hook(h: Tensor) -> Tensor:
    y = h * 0.5
    z = y * y
    y.register_hook(lambda gradient: 3 * gradient)
    return z


@case("retain_grad within the forward", "loss", DYNAMO, 91468, reported="2.0, open")
class RetainedGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        y.retain_grad()
        self.kept = y
        return x + y

    def before_step(self, step: int) -> None:
        grad = getattr(getattr(self, "kept", None), "grad", None)
        self.size = 0.0 if grad is None else float(grad.abs().mean())

    def loss(self, module: Any, batch: Any) -> Tensor:
        return (1.0 + sum(one.size for one in module.net.blocks)) * super().loss(module, batch)


@case("hooks for saved tensors around the forward", "gradient", DYNAMO, 116221, 113263, reported="2.2")
class SavedTensors(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h * h

    def loss(self, module: Any, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one * 1.5):
            return super().loss(module, batch)


# ---- graphs that are used again -------------------------------------------------------------------------------------


@case("an attribute of a class that changes", "loss", DYNAMO, 176851, reported="2.3 on, open", **LATER)
class ClassAttribute(Block):
    class Schedule:
        factor = 0.5

    def mix(self, h: Tensor) -> Tensor:
        return h * ClassAttribute.Schedule.factor

    def before_step(self, step: int) -> None:
        self.Schedule.factor = 0.5 if step < 5 else 1.5


@case("an attribute of the module's own class that changes", "loss", DYNAMO, 176851, reported="2.3 on, open", **LATER)
class OwnClassAttribute(Block):
    factor = 0.5

    def mix(self, h: Tensor) -> Tensor:
        return h * type(self).factor

    def before_step(self, step: int) -> None:
        type(self).factor = 0.5 if step < 5 else 1.5


@case("a submodule shadowed in the instance's __dict__", "loss", DYNAMO, 197859, reported="2.14, open", **LATER)
class Shadowed(Block):
    holds: ClassVar = {"act": lambda: nn.Tanh()}

    def mix(self, h: Tensor) -> Tensor:
        return self.act(h)

    def later(self) -> None:
        object.__setattr__(self, "act", nn.ReLU())


@case("a default argument of a function that changes", "loss", DYNAMO, 178365, reported="2.12", **LATER)
class DefaultArgument(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.with_default(0.5)

    @staticmethod
    def with_default(factor: float) -> Any:
        def scaled(h: Tensor, by: float = factor) -> Tensor:
            return h * by

        return scaled

    def mix(self, h: Tensor) -> Tensor:
        return self.scaled(h)

    def later(self) -> None:
        self.scaled = self.with_default(1.5)


def _activation(h: Tensor) -> Tensor:
    return torch.sin(h)


@case("a global function that is another one later", "loss", DYNAMO, 108898, reported="2.1", **LATER)
class GlobalFunction(Block):
    def mix(self, h: Tensor) -> Tensor:
        return _activation(h)

    def prepare(self) -> None:
        globals()["_activation"] = torch.sin

    def before_step(self, step: int) -> None:
        if step == 5:
            globals()["_activation"] = torch.cos


@case(
    "an attribute of the instance that changes", "loss", DYNAMO, 124357, 124717, 98928, reported="2.0 to 2.3", **LATER
)
class InstanceAttribute(Block):
    holds: ClassVar = {"adapted": lambda: False}

    def mix(self, h: Tensor) -> Tensor:
        return h * h if self.adapted else h

    def before_step(self, step: int) -> None:
        self.adapted = step >= 5


@case("a tensor of the instance that is exchanged", "loss", DYNAMO, 115774, 111785, reported="2.1", **LATER)
class ExchangedTensor(Block):
    holds: ClassVar = {"cache": lambda: torch.zeros(WIDTH)}

    def mix(self, h: Tensor) -> Tensor:
        return h + self.cache

    def later(self) -> None:
        self.cache = torch.ones(WIDTH)


@case("a forward hook that is added once code is compiled", "loss", DYNAMO, 117758, reported="2.2", **LATER)
class ForwardHook(Block):
    def later(self) -> None:
        self.linear.register_forward_hook(lambda _, given, out: out * 1.5)


@case("a backward hook that is added once code is compiled", "gradient", DYNAMO, 115750, reported="2.2, open", **LATER)
class BackwardHook(Block):
    def later(self) -> None:
        self.linear.register_full_backward_hook(lambda _, given, out: tuple(2 * one for one in given))


@case("a backward pre-hook that is added later", "gradient", DYNAMO, 117265, reported="2.2, open", **LATER)
class BackwardPreHook(Block):
    def later(self) -> None:
        self.linear.register_full_backward_pre_hook(lambda _, out: tuple(each * 2 for each in out))


@case("a forward of the instance that is replaced", "loss", DYNAMO, 117265, reported="2.2", **LATER)
class ReplacedForward(Block):
    def later(self) -> None:
        inner = type(self.linear).forward
        self.linear.forward = types.MethodType(lambda self, x, inner=inner: inner(self, x) * 1.5, self.linear)


@case("weights that are frozen and freed again", "gradient", DYNAMO, 139476, reported="2.5 to 2.14", steps=12, begins=4)
class FrozenForATime(Block):
    holds: ClassVar = {"second": lambda: nn.Linear(WIDTH, WIDTH), "calls": lambda: 0}

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.second(h + self.linear.bias)

    def before_step(self, step: int) -> None:
        self.second.requires_grad_(step % 3 == 0)


@case("a nested region that reads a global", "loss", DYNAMO, 191821, reported="to 2.14", whole=True)
def nested_region(h: Tensor) -> Tensor:
    global _held
    for factor in (0.5, 2.0):
        _held = Held(h * factor)
        h = _held_sine()
    return h


@dataclass
class Held:
    value: Tensor


_held: Any = None


@torch.compiler.nested_compile_region
def _held_sine() -> Tensor:
    return torch.sin(_held.value)


@case("cross entropy's class weights that change", "loss", DYNAMO, 98928, reported="2.0", **LATER)
class ExchangedWeights(Block):
    holds: ClassVar = {"weights": lambda: nn.Buffer(torch.ones(WIDTH))}

    def mix(self, h: Tensor) -> Tensor:
        target = torch.arange(len(h)) % WIDTH
        return h + 0.1 * functional.cross_entropy(h, target, weight=self.weights)

    def later(self) -> None:
        self.weights = torch.linspace(0.1, 2.0, WIDTH)
