"""Trainings as people write them, all of which plain Lightning finishes: networks, steps, hooks, tools beside them."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import random
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.utils.flop_counter
from lightning.pytorch import callbacks as lightning_callbacks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.promises.training import ROWS, WIDTH, Block, Module, Net, vectors


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    make: Callable[[], Module]
    options: dict[str, Any]
    """Of ``train``; ``close``: how near losses have to be. Data and callbacks may be functions that make them."""
    repeats: bool = True
    """Whether there are repeated blocks, which ``Regional`` asks for."""


CASES: dict[str, Case] = {}


def case(*, repeats: bool = True, **options: Any) -> Callable[[Any], Any]:
    """A module's class as a training."""

    def add(make: Any) -> Any:
        assert make.__name__ not in CASES
        CASES[make.__name__] = Case(make, options, repeats)
        return make

    return add


def block(**options: Any) -> Callable[[Any], Any]:
    """A block's class as a training of a network of two such blocks."""

    def add(made: Any) -> Any:
        assert made.__name__ not in CASES
        CASES[made.__name__] = Case(lambda: Module(Net([made(), made()])), options)
        return made

    return add


# ---- blocks: what is in them ----------------------------------------------------------------------------------------


@block()
class LstmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(x[:, None])
        return x + out[:, 0]


@case(repeats=False)
class PackedSequences(Module):
    def __init__(self) -> None:
        super().__init__(nn.GRU(WIDTH, WIDTH, batch_first=True))

    def loss(self, batch: Any) -> Tensor:
        x = batch[:, None].repeat(1, 5, 1)
        lengths = torch.randint(1, 6, (len(x),)).sort(descending=True).values
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.net(packed)[0].data.square().mean()


@block()
class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.2, self.training)


@block()
class BatchNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def changed(change: Callable[[Any], Any]) -> Callable[[], Module]:
    """A training of two blocks, each changed."""

    def made() -> Module:
        blocks = [Block(), Block()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in blocks:
                change(one)
        return Module(Net(blocks))

    return made


CHANGES: dict[str, Callable[[Any], Any]] = {
    "SpectralNorm": lambda block: parametrizations.spectral_norm(block.linear),
    "ScriptedInside": lambda block: setattr(block, "linear", torch.jit.script(block.linear)),
    "UnusedParameter": lambda block: setattr(block, "unused", nn.Linear(WIDTH, WIDTH)),
    "PatchedForward": lambda block: setattr(block, "forward", halved(block.forward)),
    "HookInside": lambda block: (
        block.linear.register_forward_hook(lambda module, given, out: out * 0.9),
        block.linear.register_forward_pre_hook(lambda module, given: (given[0] + 0.1,)),
    ),
    "BackwardHookInside": lambda block: block.linear.register_full_backward_hook(half_of_the_gradient),
    "HookOnItself": lambda block: (
        block.register_forward_hook(lambda module, given, out: out * 0.9),
        block.register_full_backward_hook(half_of_the_gradient),
    ),
}
CASES.update({name: Case(changed(change), {}) for name, change in CHANGES.items()})


@case(repeats=False, data=vectors(6))
class ParametrizedWeightsKeptForAStep(Module):
    """torch keeps them in a global of its own, and binds that to another dictionary when the step is over."""

    def __init__(self) -> None:
        super().__init__()
        for one in self.net.blocks:
            parametrizations.weight_norm(one.linear)

    def loss(self, batch: Any) -> Tensor:
        with parametrize.cached():
            return super().loss(batch) + super().loss(batch * 2)


class RecurrentBlock(Block):
    """Keeps its hidden state, with its graph, from one call of a step to the next."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = super().forward(x if self.hidden is None else x + self.hidden.mean(0))
        return self.hidden


class Unrolled(Module):
    """Three calls of each block in one step, one of them of another shape."""

    def __init__(self) -> None:
        super().__init__(Net([RecurrentBlock(), RecurrentBlock()]))

    def loss(self, batch: Any) -> Tensor:
        for one in self.net.blocks:
            one.hidden = None
        return (super().loss(batch) + super().loss(batch[:2]) + super().loss(batch / 2)) / 1000


CASES["Unrolled"] = Case(Unrolled, {"data": vectors(8)})


class ObservedBlock(DropoutBlock):
    """Observes what it computes, as quantization-aware training does; the first forward gives the buffer its shape."""

    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.observe(x.detach())
        return x.minimum(self.highest)

    @torch.compiler.disable
    def observe(self, x: Tensor) -> None:
        if not self.highest.numel():
            self.highest.resize_(x.shape[1]).copy_(x.amax(0))
        self.highest.lerp_(x.amax(0), 0.1)


CASES["ObservedBlock"] = Case(lambda: Module(Net([ObservedBlock(), ObservedBlock()])), {"data": vectors(6)}, False)


GENERATOR = numpy.random.default_rng(0)
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "DrawsFromNumpy": lambda x: x * torch.from_numpy(numpy.random.rand(len(x), 1)).float(),
    "MasksByNumpy": lambda x: x * float(numpy.random.choice(3, 1, replace=False)[0] > 0),
    "DrawsFromAGenerator": lambda x: x * torch.from_numpy(GENERATOR.random((len(x), 1))).float(),
    "DrawsFromPython": lambda x: x * random.uniform(0.5, 1.5),
    "Shuffles": lambda x: x[shuffled(len(x))],
}


def shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.shuffle(order)
    return order


for name, draws in DRAWS.items():

    def drawing(self: Any, x: Tensor, draws: Any = draws) -> Tensor:
        return Block.forward(self, draws(x) if self.training else x)

    def seeding(self: Any) -> None:
        GENERATOR.bit_generator.state = numpy.random.default_rng(3).bit_generator.state

    CASES[name] = Case(
        type(name, (Module,), {"block": type(name, (Block,), {"forward": drawing}), "on_fit_start": seeding}),
        {"data": vectors(6)},
    )


def halved(own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: own(x) * 0.5


def half_of_the_gradient(module: Any, given: Any, out: Any) -> Any:
    return None if given[0] is None else (given[0] * 0.5,)


class BatchNormOfTwoSizes(Module):
    """Crops of two sizes in one step: batch norm saves its running statistics, and writes to them, in both calls."""

    class block(BatchNormBlock):
        def __init__(self) -> None:
            super().__init__()
            self.norm.momentum = 0.1

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss(batch[:4])


CASES["BatchNormOfTwoSizes"] = Case(BatchNormOfTwoSizes, {"data": vectors(8)})


@block()
class WritesOnAWeightBlock(Block):
    """Keeps what it has seen as attributes of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.linear.weight
        if not hasattr(weight, "seen"):
            weight.seen = torch.zeros(())
        weight.seen += x.detach().abs().mean()
        return super().forward(x) * (1 + 0.01 * weight.seen)


@block()
class DrawsFromALibraryBlock(Block):
    """What the library's object counts lies in it, and not in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.points = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * self.points.draw(len(x)))


@block()
class TimingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.began = time.perf_counter()
        out = super().forward(x)
        self.seconds = time.perf_counter() - self.began
        return out


@block()
class GrowingBufferBlock(Block):
    """A memory bank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach().mean(0, keepdim=True)])
        return super().forward(x) + self.bank.mean(0)


@block()
class KeepsItsOutputBlock(Block):
    """For a loss of its own, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        self.outputs = [*getattr(self, "outputs", []), self.last.detach()][-3:]
        return self.last


@case()
class AuxiliaryLosses(Module):
    """Reads what the blocks kept, with its gradient."""

    block = KeepsItsOutputBlock

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * sum(one.last.square().mean() for one in self.net.blocks)


@case()
class AppendedLosses(Module):
    """Blocks append losses to a list that the module holds."""

    def __init__(self) -> None:
        losses: list[Tensor] = []

        class Appends(Block):
            def forward(self, x: Tensor) -> Tensor:
                out = super().forward(x)
                losses.append(out.square().mean())
                return out

        super().__init__(Net([Appends(), Appends()]))
        self.found = losses

    def loss(self, batch: Any) -> Tensor:
        self.found.clear()
        loss = super().loss(batch)
        self.observed = [*getattr(self, "observed", []), len(self.found)]
        return loss + 0.1 * torch.stack(self.found).sum()


SCALE = [1.0]


class _ReadsAGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * SCALE[0]


@case(data=vectors(10))
class BackwardReadsAGlobal(Module):
    """A gradient reversal whose strength grows."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_ReadsAGlobal.apply(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SCALE[0] = 1.0 - 0.2 * batch_idx


class Settings:
    scale = 1.0


@case(data=vectors(12))
class ClassAttributeChanges(Module):
    """Dynamo does not guard it."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * Settings.scale

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Settings.scale = 1.0 if batch_idx < 6 else 0.5


@case()
class ScriptedBlocks(Module):
    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(Net([torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH))) for _ in range(2)]))


@block()
class LocksAndFilesBlock(Block):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.file = threading.Lock(), io.StringIO()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.file.write("a")
            return super().forward(x)


BLOCKS: dict[str, Callable[..., Any]] = {
    "PlainBlock": Block.forward,
    "ItemBlock": lambda self, x: Block.forward(self, x) / (1.0 + x.detach().abs().max().item()),
    "ReadsItsGradientBlock": lambda self, x: (
        Block.forward(self, x) + (0 if self.linear.bias.grad is None else 0.1 * self.linear.bias.grad.detach())
    ),
    # What runs twice shows.
    "ScalesItsWeightsBlock": lambda self, x: (self.linear.weight.data.mul_(0.98), Block.forward(self, x))[1],
    "CalledRecursively": lambda self, x, depth=2: (
        self(Block.forward(self, x), depth - 1) if depth else Block.forward(self, x)
    ),
}
"""Forwards."""


def with_block(name: str, base: type[nn.Module] = Block, **members: Any) -> type[Module]:
    return type(name, (Module,), {"block": type(name, (base,), members)})


CASES.update({name: Case(with_block(name, forward=forward), {}) for name, forward in BLOCKS.items()})
CASES["OwnCallBlock"] = Case(with_block("OwnCallBlock", __call__=lambda self, x: nn.Module.__call__(self, x) * 0.5), {})
CASES["DisabledBlock"] = Case(
    with_block(
        "DisabledBlock",
        inner=torch._dynamo.disable(lambda self, x: torch.tanh(self.linear(x))),
        forward=lambda self, x: x + self.inner(x),
    ),
    {},
)
CASES["SwitchesItsModeBlock"] = Case(
    with_block(
        "SwitchesItsModeBlock",
        BatchNormBlock,
        forward=lambda self, x: (self.norm.eval(), BatchNormBlock.forward(self, x))[1],
    ),
    {},
)


@block()
class MakesAParameterBlock(Block):
    """In its first forward, outside of the optimizer."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.full((WIDTH,), 0.5))
        return super().forward(x) * self.late


# ---- blocks: what they take and give --------------------------------------------------------------------------------


class Passing(Module):
    """How the network calls its blocks is the case's own; x is the batch behind the stem."""

    def through(self, x: Tensor) -> Tensor:
        for one in self.net.blocks:
            x = self.call(one, x)
        return x

    def call(self, one: Any, x: Tensor) -> Tensor:
        return one(x)

    def loss(self, batch: Any) -> Tensor:
        return (self.net.head(self.through(self.net.stem(batch))) - 1).square().mean()


@dataclasses.dataclass
class Output:
    x: Tensor
    number: int
    more: list[Tensor]


class Named(collections.namedtuple("Named", ["x", "aux"])):
    pass


@case()
class ReturnsStructures(Passing):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            named = Named(out, (out.mean(), [1, 2, "three"]))
            more = {"named": named, "largest": out.argmax(-1), "name": "block", "none": None}
            return {"data class": Output(out, 3, [out.mean(), x]), **more}

    def call(self, one: Any, x: Tensor) -> Tensor:
        out = one(x)
        assert (out["name"], out["none"]) == ("block", None)
        found = out["data class"]
        x = found.x + found.more[0] + 0.1 * found.number
        return x + out["named"].aux[0] + 0.01 * out["largest"][:, None]


@case()
class ReturnsNothing(Passing):
    """Writes into what it was given."""

    class block(Block):
        def forward(self, x: Tensor, out: list[Tensor]) -> None:
            out.append(super().forward(x))

    def call(self, one: Any, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        assert one(x, out) is None
        return out[0]


@case()
class ReturnsAGenerator(Passing):
    class block(Block):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield super().forward(x)
            yield x

    def call(self, one: Any, x: Tensor) -> Tensor:
        return sum(one(x))  # type: ignore[assignment]


@case()
class AnyArguments(Passing):
    class block(Block):
        def forward(self, *given: Any, **named: Any) -> Tensor:
            out = super().forward(given[0]) * named["factors"]["first"]
            return named["function"](out) + given[1][0] + given[2](out).mean()

    def call(self, one: Any, x: Tensor) -> Tensor:
        return one(x, (x.mean(), "word"), self.net.stem, factors={"first": 0.5}, function=torch.tanh)


@case()
class WritesIntoTheBatch(Passing):
    """Without gradients: the batch is another one afterwards."""

    class block(Block):
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            batch.mul_(0.5)
            return super().forward(x) + batch.clone()

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch.clone())
        for one in self.net.blocks:
            x = one(x, batch)
        self.observed = [*getattr(self, "observed", []), float(batch.abs().sum())]
        return self.net.head(x).square().mean() + batch.square().mean()


@case()
class WritesIntoALeaf(Passing):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            return super().forward(x)

    def call(self, one: Any, x: Tensor) -> Tensor:
        return one(x.detach().requires_grad_())


@case()
class FillsACache(Passing):
    """A dictionary that all blocks fill, as key-value caches are."""

    class block(Block):
        def forward(self, x: Tensor, cache: dict[Any, Any]) -> Tensor:
            out = super().forward(x)
            cache[len(cache)] = out
            cache.setdefault("order", []).append(id(self))
            return out

    def through(self, x: Tensor) -> Tensor:
        cache: dict[Any, Any] = {}
        for one in self.net.blocks:
            x = one(x, cache)
        assert cache["order"] == [id(one) for one in self.net.blocks]
        return x + sum(value for key, value in cache.items() if key != "order")


@dataclasses.dataclass
class State:
    x: Tensor
    calls: int = 0


@case()
class PassesAState(Passing):
    """An object that each block changes."""

    class block(Block):
        def forward(self, state: State) -> State:
            state.x = super().forward(state.x)
            state.calls += 1
            return state

    def through(self, x: Tensor) -> Tensor:
        state = State(x)
        for one in self.net.blocks:
            assert one(state) is state
        assert state.calls == 2
        return state.x


class Memory:
    __slots__ = ("sum", "written", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.sum, self.written = x, x * 1.0, Entries(mean=torch.zeros(WIDTH))


class Entries(dict[str, Tensor]):
    pass


@case(data=vectors(8))
class WritesIntoAMemory(Passing):
    """A block writes in place to tensors of an object that it is given, and of a module."""

    class block(Block):
        def forward(self, memory: Memory, norm: nn.Module) -> None:
            memory.sum += super().forward(norm(memory.x))
            memory.written["mean"].mul_(0.9).add_(memory.sum.detach().mean(0))

    def through(self, x: Tensor) -> Tensor:
        memory, norm = Memory(x), nn.BatchNorm1d(WIDTH)
        for one in self.net.blocks:
            assert one(memory, norm) is None
        assert norm.running_mean is not None
        return memory.sum + memory.written["mean"] + norm.running_mean


@case(data=vectors(8))
class WeightsThatTheLossLeavesOut(Passing):
    """One output, in an object, is not used, and another is written into an argument: decay moves no weight that eager
    leaves without a gradient."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.unused = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, losses: list[Tensor]) -> Any:
            losses.append(self.router(x).square().mean())
            return types.SimpleNamespace(x=super().forward(x), more=self.unused(x))

    def through(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for one in self.net.blocks:
            x = one(x, losses).x
        return x + sum(losses)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def cloned(module: nn.Module) -> Any:
    """A copy with weights of its own, as meta-learners make it: learn2learn's ``clone_module``, torch's replicas."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: one.clone() * 0.5 for name, one in module._parameters.items() if one is not None}
    clone._modules = {name: cloned(one) for name, one in module._modules.items() if one is not None}
    return clone


@case()
class ClonesItsBlocks(Passing):
    def call(self, one: Any, x: Tensor) -> Tensor:
        return cloned(one)(x)


class _Enough(BaseException):
    pass


@case()
class StopsAForward(Module):
    """Takes what a layer computes, and leaves the forward by an exception of its own."""

    def loss(self, batch: Any) -> Tensor:
        found: list[Tensor] = []

        def take(module: Any, given: Any, out: Tensor) -> None:
            found.append(out)
            raise _Enough

        hook = self.net.blocks[1].linear.register_forward_hook(take)
        with contextlib.suppress(_Enough):
            self.net(batch)
        hook.remove()
        return super().loss(batch) + found[0].square().mean()


@case()
class WithAndWithoutGradients(Passing):
    """A target of its own."""

    def through(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = x
            for one in self.net.blocks:
                target = one(target)
        for one in self.net.blocks:
            x = one(x)
        return x - 0.5 * target


@case()
class InInferenceMode(Passing):
    def through(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = float(self.net.blocks[0](x).mean())
        for one in self.net.blocks:
            x = one(x)
        return x + shift


@case()
class InEvalModeInTheStep(Passing):
    block = BatchNormBlock

    def through(self, x: Tensor) -> Tensor:
        self.net.blocks.eval()
        with torch.no_grad():
            shift = self.net.blocks[0](x).mean()
        self.net.blocks.train()
        for one in self.net.blocks:
            x = one(x)
        return x + shift


@case(data=vectors(12))
class NotCalledAtFirst(Passing):
    def through(self, x: Tensor) -> Tensor:
        for one in self.net.blocks if self.global_step > 4 else []:
            x = one(x)
        return x


@case()
class CalledInAThread(Passing):
    def through(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def run() -> None:
            with torch.enable_grad():
                out = x
                for one in self.net.blocks:
                    out = one(out)
                found.append(out)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]


PASSED: dict[str, tuple[Callable[..., Any], Callable[[Any, Any, Tensor], Tensor]]] = {
    "ReturnsItsInput": (
        lambda self, x: (x, out := Block.forward(self, x), out, x[:, :4], self.linear.weight, out.detach()),
        lambda self, one, x: 0.2 * sum(part if part.shape == x.shape else part.mean() for part in one(x)),
    ),
    "ReturnsAFunction": (
        lambda self, x: (lambda out: lambda other: out + other)(Block.forward(self, x)),
        lambda self, one, x: one(x)(x),
    ),
    "WritesIntoItsInput": (
        lambda self, x: x.add_(torch.tanh(self.linear(x.clone()))),
        lambda self, one, x: one(x * 1.0),
    ),
    "CalledTwice": (Block.forward, lambda self, one, x: one(one(x))),
}
"""A block's forward, and how it is called."""
for name, (forward, call) in PASSED.items():
    members = {"block": type(name, (Block,), {"forward": forward}), "call": call}
    CASES[name] = Case(type(name, (Passing,), members), {})


CALLS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "CalledByForward": lambda self, one, x: one.forward(x),
    "NeverCalled": lambda self, one, x: x + torch.tanh(one.linear(x)),
    "OfTheDetached": lambda self, one, x: one(x.detach()),
    "CheckpointedBlocks": lambda self, one, x: checkpoint(one, x, use_reentrant=False),
    "CheckpointedReentrantly": lambda self, one, x: checkpoint(one, x, use_reentrant=True),
}
for name, call in CALLS.items():
    blocks = {"block": BatchNormBlock} if name == "CheckpointedBlocks" else {}
    CASES[name] = Case(type(name, (Passing,), {"call": call, **blocks}), {"data": vectors(12)})


@case(data=vectors(12))
class CheckpointedShapes(Passing):
    """Further ones come within a step, behind one that is known: each is computed again as it was computed."""

    def call(self, one: Any, x: Tensor) -> Tensor:
        return checkpoint(one, x, use_reentrant=False)

    def loss(self, batch: Any) -> Tensor:
        rows = (ROWS, 5, ROWS, 3, 7)[: 1 + self.global_step // 2]
        return sum(super(CheckpointedShapes, self).loss(batch[:count]) for count in rows)  # type: ignore[return-value]


@case()
class OneOutputUnused(Passing):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.pooler(x)

    def call(self, one: Any, x: Tensor) -> Tensor:
        return one(x)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


@case()
class DifferentTypes(Passing):
    """Token numbers, masks and a size."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, rows: int) -> Tensor:
            assert rows == len(x)
            return torch.where(mask, self.linear(x), self.table(tokens))

    def through(self, x: Tensor) -> Tensor:
        tokens = torch.arange(len(x)) % 20
        for one in self.net.blocks:
            x = one(x, tokens, tokens[:, None] % 2 == 0, len(x))
        return x


@case(data=[torch.randn(rows, WIDTH) for rows in (8, 5, 3, 8, 1, 7, 2, 0, 8)], close=1e-3)
class ManyShapes(Module):
    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch) - 1).square().sum() / 8


@case(data=[[one, 0.5 + i, f"name {i}", None, {"deep": (one, 1)}] for i, one in enumerate(vectors(8))])
class AnyBatch(Passing):
    """Numbers, words, nothing."""

    class block(Block):
        def forward(self, x: Tensor, scale: Any, name: Any, none: Any, deep: Any) -> Tensor:
            assert none is None
            return super().forward(x) * (scale / 4) + len(name) + deep["deep"][0].mean()

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch[0])
        for one in self.net.blocks:
            x = one(x, *batch[1:])
        return (self.net.head(x) - 1).square().mean() * 1e-2


class Tagged(torch.Tensor):
    """A tensor subclass, whose operations go through ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        return super().__torch_function__(function, kinds, given, named or {})


def jagged(*rows: Tensor) -> Tensor:
    made: Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return made


@case(data=lambda: [jagged(one, one[: 2 + i % 3]) for i, one in enumerate(vectors(12))])
class JaggedBatch(Module):
    """Lengths that differ from batch to batch."""

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch).values() - 1).square().mean()


@case(data=lambda: [torch.nested.nested_tensor([one, one[:2]]) for one in vectors(6)])
class NestedWithin(Module):
    """What has no shape is handed to every block, on its own and in a list."""

    class block(Block):
        def forward(self, x: Any) -> Any:
            return [self.linear(x[0])] if isinstance(x, list) else self.linear(x)

    def __init__(self) -> None:
        super().__init__(Net([self.block(), self.block()]))

    def loss(self, batch: Any) -> Tensor:
        first, second = self.net.blocks
        return (second([first(batch)])[0].to_padded_tensor(0.0) - 1).square().mean()


@case()
class SparseEmbedding(Module):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(len(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


# ---- modules that are compiled already ------------------------------------------------------------------------------


OWN_COMPILES: dict[str, Callable[[Any], Any]] = {
    "CompilesItsNet": lambda self: self.net.compile(backend="aot_eager"),
    "HoldsACompiledNet": lambda self: setattr(self, "net", torch.compile(self.net, backend="aot_eager")),
    "CompilesABlock": lambda self: self.net.blocks[0].compile(backend="aot_eager"),
    "CompilesTheLayers": lambda self: [one.linear.compile(backend="aot_eager") for one in self.net.blocks],
    "CompilesItsLoss": lambda self: setattr(self, "loss", torch.compile(self.loss, backend="aot_eager")),
}
for name, compiles in OWN_COMPILES.items():
    for hook in ("__init__", "on_fit_start", "on_train_start"):

        def own(self: Any, compiles: Any = compiles, hook: str = hook) -> None:
            getattr(Module, hook)(self)
            compiles(self)

        where = hook.strip("_").title().replace("_", "")
        CASES[f"{name}{where}"] = Case(type(f"{name}{where}", (Module,), {hook: own}), {"data": vectors(8)})


@block()
class CompiledFunctionBlock(Block):
    @functools.partial(torch.compile, backend="aot_eager")
    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


# ---- modules that change --------------------------------------------------------------------------------------------


def at(*steps: int) -> Callable[[Any], Any]:
    """A training whose module is changed before these steps."""

    def add(change: Callable[[Any], None]) -> Any:
        class Changes(Module):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if batch_idx in steps:
                    change(self)

        Changes.__name__ = change.__name__
        return case(data=vectors(10))(Changes)

    return add


@at(4)
def ReplacesABlock(self: Any) -> None:
    torch.manual_seed(5)
    self.net.blocks[0] = Block()
    self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks[0].parameters())})


@at(4)
def ReplacesALayerOfABlock(self: Any) -> None:
    torch.manual_seed(5)
    self.net.blocks[0].linear = nn.Linear(WIDTH, WIDTH, bias=False)
    self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks[0].linear.parameters())})


@at(4)
def PatchesAForwardLater(self: Any) -> None:
    one = self.net.blocks[0]
    one.forward = types.MethodType(lambda self, x: x - torch.tanh(self.linear(x)), one)


@case(data=vectors(10))
class AddsHooksLater(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net.blocks[0].register_forward_hook(lambda module, given, out: out * 0.5)
        if batch_idx == 5:
            self.net.blocks[1].linear.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        if batch_idx == 7:
            self.net.blocks[1].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))


@case(data=vectors(10))
class HooksOfAllModules(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 != 2:
            return self.loss(batch)
        found: list[str] = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: found.append(type(module).__name__))
        try:
            return self.loss(batch)
        finally:
            handle.remove()
            self.observed = [*getattr(self, "observed", []), len(found)]


class RecordsGradients(Module):
    """By hooks of the backward, in every third step."""

    def __init__(self, register: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.register = register

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.handles, self.found = [], []
        found: list[float] = []  # which nothing but the hooks holds
        if batch_idx % 3 == 0:
            hook = lambda module, given, out: found.append(round(float(out[0].sum()), 4))  # noqa: E731
            self.handles, self.found = [self.register(block, hook) for block in self.net.blocks], found
        return self.loss(batch)

    def on_after_backward(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.observed = [*getattr(self, "observed", []), *self.found]


CASES["RecordsGradients"] = Case(
    lambda: RecordsGradients(lambda block, hook: block.register_full_backward_hook(hook)),
    {"data": vectors(8)},
    False,
)
CASES["RecordsGradientsOfAllModules"] = Case(
    lambda: RecordsGradients(lambda block, hook: nn.modules.module.register_module_full_backward_hook(hook)),
    {"data": vectors(8)},
    False,
)


@case(data=vectors(8))
class ExtractsFeatures(Module):
    """Hooks on layers inside of blocks, for one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found: list[Tensor] = []
        handles = [
            one.linear.register_forward_hook(lambda module, given, out: found.append(out))
            for one in self.net.blocks
            if batch_idx % 2
        ]
        loss = self.loss(batch) + 0.1 * sum((one.square().mean() for one in found), torch.zeros(()))
        self.observed = [*getattr(self, "observed", []), len(found)]
        for handle in handles:
            handle.remove()
        return loss


@case(data=vectors(8))
class CountsItsParametersHooks(Module):
    """Hooks of parameters run once a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[Any] = []
        for one in self.net.blocks:
            one.linear.weight.register_hook(self.seen)
            one.linear.bias.register_post_accumulate_grad_hook(lambda _: self.counted.update(["accumulated"]))
        self.counted = collections.Counter[str]()

    def seen(self, gradient: Tensor) -> Tensor:
        self.counted.update(["hook"])
        return gradient * 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observed.append(dict(self.counted))


@case()
class TiedBlocks(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].linear.weight = self.net.blocks[0].linear.weight
        self.net.stem.weight = self.net.blocks[0].linear.weight


@case()
class OneBlockTwice(Module):
    def __init__(self) -> None:
        one = Block()
        super().__init__(Net([one, Block(), one]))


@case(data=vectors(8))
class GoesToDouble(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.net.double()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch.to(self.net.head.weight.dtype))


@case(data=vectors(10))
class FreezesAndUnfreezes(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.blocks[0].requires_grad_(batch_idx % 4 < 2)
        self.net.blocks[1].linear.bias.requires_grad_(batch_idx > 5)


@case(repeats=False)
class LazyNetwork(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(1)))


@at(1, 4, 7)
def ChangesItsWeightsData(self: Any) -> None:
    self.net.blocks[0].linear.weight.data = self.net.blocks[0].linear.weight.data.clone() * 0.9


@at(4)
def ReplacesAParameter(self: Any) -> None:
    linear = self.net.blocks[0].linear
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)
    group = self.trainer.optimizers[0].param_groups[0]
    group["params"] = list(self.parameters())


@case(data=vectors(8))
class LoadsAState(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = copy.deepcopy(self.net.state_dict())
        if batch_idx in (3, 5):
            self.net.load_state_dict(self.kept, assign=batch_idx == 5)
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())


# ---- copies, saves, exports, tools ----------------------------------------------------------------------------------

TOOLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "deepcopy": lambda net, x: copy.deepcopy(net)(x),
    "pickle": lambda net, x: pickle.loads(pickle.dumps(net))(x),
    "jit.trace": lambda net, x: torch.jit.trace(net, x)(x),
    "jit.script": lambda net, x: torch.jit.script(net.blocks[0])(x),  # type: ignore[operator, index]
    "export": lambda net, x: torch.export.export(net, (x,)).module()(x),
    "fx": lambda net, x: torch.fx.symbolic_trace(net)(x),
    "vmap": lambda net, x: torch.func.vmap(
        lambda one: torch.func.functional_call(net, dict(net.named_parameters()), one)
    )(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,)),
    "hvp": lambda net, x: torch.autograd.functional.hvp(lambda one: net(one).square().sum(), x, x),
    "flops": lambda net, x: under(torch.utils.flop_counter.FlopCounterMode(display=False), net, x),
    "fake tensors": lambda net, x: fake(net, x),
    "own compile": lambda net, x: torch.compile(net, backend="aot_eager")(x),
    "compiler reset": lambda net, x: torch.compiler.reset(),
    "dynamo explain": lambda net, x: torch._dynamo.explain(net)(x).graph_count,
    "backward": lambda net, x: torch.autograd.grad(net(x).sum(), list(net.parameters())),
    "onnx-like hooks": lambda net, x: hooked(net, x),
    "anomalies": lambda net, x: under(torch.autograd.detect_anomaly(), net, x),
    "saved tensors": lambda net, x: under(torch.autograd.graph.save_on_cpu(), net, x),
}
"""What is done with a network while a training goes on; each gets the network and a batch."""


def saved(net: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


def under(context: Any, net: nn.Module, x: Tensor) -> Tensor:
    with context:
        return net(x)


def fake(net: nn.Module, x: Tensor) -> Any:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return net(x).shape


def hooked(net: Any, x: Tensor) -> int:
    """As a summary does."""
    shapes: list[Any] = []
    handles = [one.register_forward_hook(lambda module, given, out: shapes.append(out.shape)) for one in net.modules()]
    net(x)
    for handle in handles:
        handle.remove()
    return len(shapes)


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        return function(*given, **(named or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        return function(*given, **(named or {}))


class WithATool(Module):
    """Uses a tool in the middle of a training: in a hook between batches, within a step, or between epochs."""

    def __init__(self, tool: str, places: Sequence[str]) -> None:
        super().__init__()
        self.tool, self.places, self.uses = TOOLS[tool], places, 0

    def use(self, place: str) -> None:
        if place not in self.places:
            return
        self.uses += 1
        drawn = torch.random.get_rng_state()
        self.net.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tool(self.net, vectors(1, seed=7)[0])
        self.net.train()
        torch.random.set_rng_state(drawn)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            self.use("first step")
        if batch_idx in (3, 4):
            self.use("step")
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 3):
            self.use("batch start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 3):
            self.use("batch end")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step in (0, 3):
            self.use("before zero_grad")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.use("validation")
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.use("epoch end")


STEP_PLACES = ("first step", "step")
OTHER_PLACES = ("batch start", "batch end", "before zero_grad", "validation", "epoch end")
"""Of tools: within a step, and between steps, where the module is plain."""


@case(data=vectors(8))
class TeacherOfItself(Module):
    """A copy made within the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 0:
            self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]
        return (self.net(batch) - 0.5 * self.teacher[0](batch) - 1).square().mean()


@case(data=vectors(8))
class CopiesItselfWhole(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer, self.trainer = self.trainer, None  # type: ignore[assignment]
            copied = copy.deepcopy(self)
            self.trainer = trainer
            assert float(copied.loss(batch)) == float(self.loss(batch))


class WithRate(Module):
    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


for tried, given in {
    "StochasticWeightAveraging": lambda: [
        lightning_callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    ],
    "EmaWeightAveraging": lambda: [lightning_callbacks.EMAWeightAveraging()],
    "GradientAccumulationScheduler": lambda: [lightning_callbacks.GradientAccumulationScheduler({0: 2, 1: 1})],
    "ModelPruning": lambda: [lightning_callbacks.ModelPruning("l1_unstructured", amount=0.2)],
    "LearningRateFinder": lambda: [lightning_callbacks.LearningRateFinder(num_training_steps=6, update_attr=True)],
}.items():
    CASES[tried] = Case(
        WithRate, {"callbacks": given, "max_epochs": 3, "validation": vectors(2, seed=2), "enable_checkpointing": True}
    )


# ---- steps ----------------------------------------------------------------------------------------------------------


def penalty(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The squared norm of the gradient by the inputs, to be differentiated again."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return gradient.square().sum(-1).mean()


@case()
class GradientPenalty(Module):
    def loss(self, batch: Any) -> Tensor:
        with torch.enable_grad():
            return super().loss(batch) + 0.1 * penalty(self.net, batch)


@case(data=vectors(8))
class SecondOrderByHand(Module):
    """One step of an inner training, through which the outer one goes (MAML)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = dict(self.net.named_parameters())
        inner = torch.func.functional_call(self.net, weights, (batch,)).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: one - 0.1 * g for (name, one), g in zip(weights.items(), gradients, strict=True)}
        return (torch.func.functional_call(self.net, moved, (batch,)) - 1).square().mean()


@case()
class KeepsTheGraph(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.net.blocks.parameters()), retain_graph=True)
        return loss * (1 + 0.01 * float(sum(one.square().sum() for one in gradients)))


class ByHand(Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def step_with(self, loss: Tensor, **options: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, **options)
        optimizer.step()
        self.observed = [*getattr(self, "observed", []), round(float(loss.detach()), 4)]


@case()
class CreatesAGraphByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.step_with(loss, create_graph=True)
        for one in self.parameters():
            one.grad = None
        return {"loss": loss.detach()}


@case()
class SharpnessAware(ByHand):
    """Two forwards and backwards in each step, weights moved in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        moved = [(one, 0.05 * one.grad.sign()) for one in self.parameters() if one.grad is not None]
        with torch.no_grad():
            for one, by in moved:
                one.add_(by)
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for one, by in moved:
                one.sub_(by)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}


@case()
class ScalesByHand(ByHand):
    """A gradient scaler of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scaler = getattr(self, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.observed = [*getattr(self, "observed", []), self.scaler.get_scale()]
        return {"loss": loss.detach()}


class Refused(ValueError):
    pass


@case(data=vectors(8))
class CatchesAnError(Module):
    """A block raises in some steps, the first one included, and the step catches it."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            if bool(x.isnan().any()):
                raise Refused("not a number")
            return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in (0, 4):
            batch = batch * float("nan")
        try:
            return self.loss(batch)
        except Refused:
            self.observed = [*getattr(self, "observed", []), batch_idx]
            return None


@case(data=vectors(8))
class CatchesRunningOutOfMemory(Module):
    class block(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise torch.OutOfMemoryError("out of memory, says the test")
            return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.blocks[1].fails = batch_idx in (1, 5)
        try:
            return self.loss(batch)
        except torch.OutOfMemoryError:
            self.net.blocks[1].fails = False
            return self.loss(batch[: ROWS // 2])


MODULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "NoParameters": ({"block": type("Tanh", (nn.Module,), {"forward": lambda self, x: torch.tanh(x)})}, {}),
    "SubclassedBatch": ({}, {"data": lambda: [one.as_subclass(Tagged) for one in vectors(6)]}),
    "ClosureOfLbfgs": (
        {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)},
        {},
    ),
    # The first one included.
    "LeavesBatchesOut": (
        {"training_step": lambda self, batch, batch_idx: None if batch_idx in (0, 3) else self.loss(batch)},
        {"data": vectors(8)},
    ),
    "EndsAnEpochEarly": (
        {"on_train_batch_start": lambda self, batch, batch_idx: -1 if batch_idx == 5 else None},
        {"data": vectors(8), "max_epochs": 2},
    ),
    # Eager goes on.
    "LossIsNoNumber": (
        {"training_step": lambda self, batch, batch_idx: self.loss(batch * (float("nan") if batch_idx == 5 else 1.0))},
        {"data": vectors(8)},
    ),
    "LossIsInfinite": (
        {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=1e20)},
        {"data": vectors(6)},
    ),
    # A constant: the gradient of everything is zero.
    "LossOfNothing": (
        {"training_step": lambda self, batch, batch_idx: self.loss(batch) * 0.0},
        {"data": vectors(6)},
    ),
    "ValidatesBeforehand": (
        {"block": BatchNormBlock},
        {"data": vectors(6), "validation": vectors(2, seed=3), "num_sanity_val_steps": 2},
    ),
}
"""Members of a module, and options of its training."""
for name, (members, options) in MODULES.items():
    CASES[name] = Case(type(name, (Module,), members), options, repeats=name != "NoParameters")


class Under(Module):
    """Every second step runs in a context of its own."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.context = context

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with contextlib.nullcontext() if batch_idx % 2 else self.context():
            return self.loss(batch)


OPTIONS: dict[str, dict[str, Any]] = {
    "ValidatesOtherShapes": {"validation": [torch.randn(rows, WIDTH) for rows in (3, 5, 8)], "val_check_interval": 2},
}
CASES.update({name: Case(Module, options) for name, options in OPTIONS.items()})


CONTEXTS: dict[str, Callable[[], Any]] = {
    "UnderAMode": Dispatching,
    "UnderAFunctionMode": FunctionMode,
    "UnderAutocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "SavedTensorsHooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1.0, lambda x: x),
}
for name, context in CONTEXTS.items():
    CASES[name] = Case(functools.partial(Under, context), {"close": 2e-2 if name == "UnderAutocast" else 1e-4})

for precision, tolerance in (("bf16-mixed", 2e-2), ("bf16-true", 5e-2), ("64-true", 1e-6), ("16-true", 5e-2)):
    CASES[f"Precision {precision}"] = Case(
        lambda: Module(Net([nn.Sequential(BatchNormBlock(), DropoutBlock()) for _ in range(2)])),
        {"precision": precision, "close": tolerance, "data": None},
    )


@case(data=vectors(8), gradient_clip_val=0.1, accumulate_grad_batches=2)
class ClipsAndAccumulates(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 20), "interval": "step"}
        ]


@case(data=vectors(6), validation=vectors(2, seed=3), num_sanity_val_steps=1, val_check_interval=3)
class ValidatesAPaddedTransformer(Module):
    """Torch's encoder hands its layers a nested tensor then, which has no shape."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.net.blocks = nn.ModuleList([nn.TransformerEncoder(layer, 2)])

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch).unflatten(0, (2, -1))
        padded = torch.arange(x.shape[1]) >= torch.tensor([[x.shape[1]], [2]])
        return (self.net.head(self.net.blocks[0](x, src_key_padding_mask=padded).mean(1)) - 1).square().mean()


@case(data=vectors(6), validation=vectors(2, seed=3), val_check_interval=3)
class ValidatesWithGradients(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad(), torch.inference_mode(False):
            x = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(x).sum(), x)
        self.log("val_loss", gradient.square().mean())


CASES["ValidatesWithGradients"].options["inference_mode"] = False
