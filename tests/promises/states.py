"""Kinds of state that ordinary Python code keeps, each with one way to advance it."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import io
import itertools
import logging
import os
import queue
import random
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from crucible import Regional, Strategy, Whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.promises.training import WIDTH, Block, Module, Net, Outcome, apart, train, vectors
from tests.trainer.recording import Recorded, RecordedNetwork

Advance = Callable[[Any], float]
"""Given the module that owns it: advances the state by one and returns a number that says how far it is."""
KINDS: dict[str, Callable[[Any], Advance]] = {}
"""By name: given a module, puts the state at its beginning and returns what advances it."""


def kind(make: Callable[[Any], Advance]) -> Callable[[Any], Advance]:
    KINDS[make.__name__.replace("_", " ").strip()] = make
    return make


# ---- functions, closures, iterators ---------------------------------------------------------------------------------


@kind
def closure(_: Any) -> Advance:
    count = 0

    def advance(_: Any) -> float:
        nonlocal count
        count += 1
        return count

    return advance


@kind
def function_attribute(_: Any) -> Advance:
    def advance(_: Any) -> float:
        advance.count += 1  # type: ignore[attr-defined]
        return advance.count  # type: ignore[attr-defined]

    advance.count = 0  # type: ignore[attr-defined]
    return advance


@kind
def mutable_default(_: Any) -> Advance:
    def advance(_: Any, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        return len(seen)

    return advance


@kind
def coroutine(_: Any) -> Advance:
    @types.coroutine
    def pause(value: int) -> Any:
        yield value

    async def count() -> None:
        number = 0
        while True:
            number += 1
            await pause(number)

    made = count()
    return lambda _: made.send(None)


# ---- globals and classes --------------------------------------------------------------------------------------------

GLOBAL = 0
GLOBAL_DICTIONARY: dict[str, int] = {}
GLOBAL_TENSOR = torch.zeros(())


@kind
def module_global(_: Any) -> Advance:
    def advance(_: Any) -> float:
        global GLOBAL
        GLOBAL += 1
        return GLOBAL

    globals()["GLOBAL"] = 0
    return advance


@kind
def global_of_another_module(_: Any) -> Advance:
    other: Any = types.ModuleType("tests_promises_other")
    sys.modules["tests_promises_other"] = other
    other.count = 0

    def advance(_: Any) -> float:
        import tests_promises_other as found  # type: ignore[import-not-found]

        found.count += 1
        return found.count

    return advance


@kind
def attribute_of_the_modules_class(module: Any) -> Advance:
    type(module).tests_count = 0

    def advance(owner: Any) -> float:
        type(owner).tests_count += 1
        return type(owner).tests_count

    return advance


@kind
def metaclass_attribute(_: Any) -> Advance:
    class Meta(type):
        count = 0

    class Holder(metaclass=Meta):
        pass

    def advance(_: Any) -> float:
        Meta.count += 1
        return Holder.count

    return advance


# ---- containers and objects -----------------------------------------------------------------------------------------


def container(name: str, made: Callable[[], Any], step: Callable[[Any], Any], far: Callable[[Any], float]) -> None:
    def make(_: Any) -> Advance:
        held = made()

        def advance(_: Any) -> float:
            step(held)
            return far(held)

        return advance

    KINDS[name] = make


def incremented(held: Any) -> None:
    held["count"] += 1


def add_to(name: str) -> Callable[[Any], None]:
    """Adds to an attribute, which may begin with it."""
    return lambda held: setattr(held, name, getattr(held, name, 0) + 1)


class OwnList(list[int]):
    pass


class EasyDict(dict[str, int]):
    """What is set is an attribute and an entry, as in easydict and ml_collections."""

    def __init__(self) -> None:
        self.count = 0

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value)
        self[name] = value


@dataclasses.dataclass(slots=True)
class SlottedData:
    count: int = 0


@dataclasses.dataclass(frozen=True)
class FrozenData:
    count: int = 0


class Slots:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Plain:
    count = 0


class Owner:
    """Counts when it, its method or its property is asked."""

    def __init__(self) -> None:
        self._count = 0

    def advance(self, _: Any = None) -> float:
        self._count += 1
        return self._count

    __call__ = advance
    count = property(advance)


class OnDemand:
    def __getattr__(self, name: str) -> int:
        self.__dict__["made"] = self.__dict__.get("made", 0) + 1
        return self.__dict__["made"]


KEPT: list[Any] = []


def weakly_referenced() -> Any:
    KEPT.append(Slots())
    return weakref.ref(KEPT[-1])


def in_a_thread(held: Any) -> None:
    thread = threading.Thread(target=add_to("count"), args=(held,))
    thread.start()
    thread.join()


def weakly_keyed() -> Any:
    held = Slots()
    return held, weakref.WeakKeyDictionary({held: 0})


def proxied() -> Any:
    behind = {"count": 0}
    return behind, types.MappingProxyType(behind)


def counting() -> Any:
    total = 0.0
    while True:
        total += (yield total) or 1.0


def begun() -> Any:
    made = counting()
    next(made)
    return made


def written_file() -> Any:
    return tempfile.TemporaryFile("w+")


def numbered_file() -> Any:
    file = written_file()
    file.write("\n".join(str(number) for number in range(1, 300)))
    file.seek(0)
    return file


given: Any
for given in (
    ("queue", queue.Queue, lambda held: held.put(1), lambda held: held.qsize()),
    ("deque", collections.deque, lambda held: held.append(1), len),
    ("ordered dictionary", lambda: collections.OrderedDict(count=0), incremented, lambda held: held["count"]),
    ("list's subclass", OwnList, lambda held: held.append(1), len),
    ("dictionary with attributes", EasyDict, add_to("count"), lambda held: held.count + held["count"]),
    ("array of array", lambda: array.array("d", [0.0]), lambda held: held.__setitem__(0, held[0] + 1), lambda h: h[0]),
    ("memory view", lambda: memoryview(bytearray(1)), lambda held: held.__setitem__(0, held[0] + 1), lambda h: h[0]),
    ("numpy array", lambda: numpy.zeros(3), lambda held: held.__iadd__(1), lambda held: float(held[0])),
    ("data class with slots", SlottedData, add_to("count"), lambda held: held.count),
    ("object with slots", Slots, add_to("count"), lambda held: held.count),
    ("namespace", lambda: types.SimpleNamespace(count=0), add_to("count"), lambda held: held.count),
    ("thread's own", threading.local, lambda h: setattr(h, "n", getattr(h, "n", 0) + 1), lambda held: held.n),
    ("text file in memory", io.StringIO, lambda held: held.write("a"), lambda held: held.tell()),
    ("set of names", set, lambda held: held.add(len(held)), len),
    ("nested", lambda: {"a": [{"count": 0}]}, lambda held: incremented(held["a"][0]), lambda h: h["a"][0]["count"]),
    ("enumeration's member", lambda: enum.Enum("Phase", "FIRST")["FIRST"], add_to("count"), lambda held: held.count),  # type: ignore[index]
    ("memo", lambda: functools.cache(int), lambda h: h(h.cache_info().currsize), lambda h: h.cache_info().currsize),
    ("weak dictionary", weakly_keyed, lambda h: h[1].__setitem__(h[0], h[1][h[0]] + 1), lambda h: h[1][h[0]]),
    ("proxied mapping", proxied, lambda held: incremented(held[0]), lambda held: held[1]["count"]),
    ("context variable", lambda: ContextVar("tests", default=0), lambda h: h.set(h.get() + 1), lambda h: h.get()),
    ("partial of a list", lambda: functools.partial(list.append, []), lambda held: held(1), lambda h: len(h.args[0])),
    ("class attribute", lambda: type("Holder", (), {}), add_to("count"), lambda held: held.count),
    ("weakly referenced object", weakly_referenced, lambda held: add_to("count")(held()), lambda held: held().count),
    ("counter of another thread", Plain, in_a_thread, lambda held: held.count),
    (
        "global dictionary",
        lambda: GLOBAL_DICTIONARY.update(count=0),
        lambda _: incremented(GLOBAL_DICTIONARY),
        lambda _: GLOBAL_DICTIONARY["count"],
    ),
    (
        "global tensor",
        lambda: [GLOBAL_TENSOR.zero_()].clear(),
        lambda _: GLOBAL_TENSOR.add_(1),
        lambda _: float(GLOBAL_TENSOR),
    ),
    (
        "environment",
        lambda: os.environ.update(TESTS_PROMISES="0"),
        lambda _: os.environ.__setitem__("TESTS_PROMISES", str(int(os.environ["TESTS_PROMISES"]) + 1)),
        lambda _: int(os.environ["TESTS_PROMISES"]),
    ),
):
    container(*given)


for name, made, draw in (  # what answers by going on
    ("attribute made on demand", OnDemand, lambda held: held.anything),
    ("generator object", counting, next),
    ("generator that is sent to", begun, lambda held: held.send(1.0)),
    ("counter of itertools", lambda: itertools.count(1), next),
    ("iterator of a list", lambda: iter(list(range(1, 300))), next),
    ("zip and enumerate", lambda: enumerate(zip(range(300), range(300), strict=True), 1), lambda held: next(held)[0]),
    ("file that is read", numbered_file, lambda held: float(held.readline())),
    ("random generator of ones own", lambda: random.Random(0), lambda held: held.random()),
    ("random numbers of python", lambda: random.seed(0), lambda _: random.random()),
    ("generator of numpy", lambda: numpy.random.default_rng(0), lambda held: float(held.random())),
    ("random numbers of numpy", lambda: numpy.random.seed(0), lambda _: float(numpy.random.rand())),
    ("generator of torch", lambda: torch.Generator().manual_seed(0), lambda g: float(torch.rand((), generator=g))),
    ("random numbers of torch", lambda: None, lambda _: float(torch.rand(()))),
):
    container(name, made, lambda held: None, draw)
KINDS["object of a bound method"] = lambda _: Owner().advance


@kind
def handler_of_logging(_: Any) -> Advance:
    class Counts(logging.Handler):
        count = 0

        def emit(self, record: Any) -> None:
            self.count += 1

    handler = Counts()
    logger = logging.Logger("tests.promises")
    logger.addHandler(handler)

    def advance(_: Any) -> float:
        logger.warning("a step")
        return handler.count

    return advance


# ---- modules and tensors --------------------------------------------------------------------------------------------


def replaced(owner: Any) -> None:
    owner.held = dataclasses.replace(owner.held, count=owner.held.count + 1)


def attribute(name: str, made: Callable[[], Any], step: Callable[[Any], Any], far: Callable[[Any], float]) -> None:
    def make(module: Any) -> Advance:
        module.held = made()

        def advance(owner: Any) -> float:
            step(owner)
            return far(owner)

        return advance

    KINDS[name] = make


for given in (
    ("module's number", lambda: 0, add_to("held"), lambda owner: owner.held),
    ("module's list", list, lambda owner: owner.held.append(1), lambda owner: len(owner.held)),
    ("module's dictionary", lambda: {"count": 0}, lambda o: incremented(o.held), lambda o: o.held["count"]),
    ("module's object", Plain, lambda owner: add_to("count")(owner.held), lambda owner: owner.held.count),
    ("module's tensor", lambda: torch.zeros(()), lambda o: o.held.add_(1), lambda o: float(o.held)),
    ("module's tensors in a list", lambda: [torch.zeros(())], lambda o: o.held[0].add_(1), lambda o: float(o.held[0])),
    ("attribute that begins later", int, add_to("begun"), lambda owner: owner.begun),
    ("buffer", lambda: nn.Buffer(torch.zeros(())), lambda o: o.held.add_(1), lambda o: float(o.held)),
    (
        "buffer that is replaced",
        lambda: nn.Buffer(torch.zeros(()), persistent=False),
        add_to("held"),
        lambda o: float(o.held),
    ),
    ("attribute of a parameter", int, lambda o: add_to("n")(next(o.parameters())), lambda o: next(o.parameters()).n),
    ("frozen data class that is replaced", FrozenData, replaced, lambda owner: owner.held.count),
):
    attribute(*given)


@kind
def hook_of_a_layer(_: Any) -> Advance:
    layer, held = nn.Linear(2, 2), Plain()
    layer.register_forward_hook(lambda *_: add_to("count")(held))

    def advance(_: Any) -> float:
        with torch.no_grad():
            layer(torch.zeros(1, 2))
        return held.count

    return advance


@kind
def weight_that_the_step_itself_moves(module: Any) -> Advance:
    module.teacher = nn.Linear(2, 2).requires_grad_(False)
    nn.init.zeros_(module.teacher.weight)

    def advance(owner: Any) -> float:
        with torch.no_grad():
            owner.teacher.weight += 1
        return float(owner.teacher.weight[0, 0])

    return advance


# ---- trainings ------------------------------------------------------------------------------------------------------


class Vectors(Dataset[Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


PLACES = ("training_step", "validation_step", "hook", "block")
BESIDE_REGIONS = ("closure", "module global", "generator of torch", "random numbers of torch", "buffer")
"""Kinds for all places; in others than a block nothing runs again, whatever it advances."""


class CountingBlock(Block):
    """A block whose forward advances a state."""

    def __init__(self, make: Callable[[Any], Advance] | None) -> None:
        super().__init__()
        self.advance = None if make is None else make(self)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.advance is None else out * (1.0 + 0.01 * self.advance(self))


class Counting(Module):
    """Its loss is scaled by a state that one place advances."""

    def __init__(self, name: str, place: str) -> None:
        make = KINDS[name]
        super().__init__(Net([CountingBlock(make if place == "block" else None) for _ in range(2)]))
        self.place, self.value = place, 0.0
        self.advance: Any = None if place == "block" else make(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = self.advance(self) if self.place == "training_step" else self.value
        return self.loss(batch) * (1.0 + 0.1 * value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.place == "validation_step":
            self.value = self.advance(self)
        self.log("val_loss", self.loss(batch))

    def final(self) -> list[float]:
        """How far the state is, by advancing it once more."""
        if self.place == "block":
            return [float(block.advance(block)) for block in self.net.blocks]
        return [float(self.advance(self))]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


class CountingInAHook(Counting):
    """No step with such a hook is captured."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.value = self.advance(self)


def train_with(name: str, place: str, strategies: list[Strategy] | None, epochs: int) -> tuple[Outcome, list[float]]:
    """Train epochs of six steps with validations; what came, and how far the state is in the end."""
    final: list[float] = []
    outcome = train(
        lambda: (CountingInAHook if place == "hook" else Counting)(name, place),
        strategies,
        data=DataLoader(Vectors(), batch_size=8),
        validation=vectors(2, seed=1),
        val_check_interval=2,
        max_epochs=epochs,
        then=lambda _, module: final.extend(module.final()),
    )
    return outcome, final


STRATEGIES: dict[str, Callable[[], list[Strategy]]] = {
    "regional": lambda: [Regional(backend="eager")],
    "whole": lambda: [Whole(backend="eager")],
    "network": lambda: [RecordedNetwork()],
    "step": lambda: [Recorded()],
}


def trainings() -> Iterator[tuple[str, str, str]]:
    """Names of kinds, places and strategies; a step that is captured is what advances the state."""
    for name in KINDS:
        for place in PLACES if name in BESIDE_REGIONS else ("block",):
            yield from ((name, place, strategy) for strategy in STRATEGIES if strategy != "step")
        yield name, "training_step", "step"


UNSEEN_BY_A_CAPTURE = (
    "environment", "thread's own", "enumeration's member", "counter of another thread", "attribute of a parameter",
)  # fmt: skip
"""Kinds that a captured step advances by its own code, and a replay does not: audits alone find that."""


@functools.lru_cache(maxsize=1)
def plain(name: str, place: str, epochs: int) -> tuple[Outcome, list[float]]:
    """Plain Lightning's training, which those under strategies follow."""
    return train_with(name, place, None, epochs)


def difference(name: str, place: str, strategy: str) -> str | None:
    """How a training under a strategy is not plain Lightning's; None where it is."""
    epochs = 3 if strategy == "step" else 1  # a graph has to repeat a step before it trains
    eager, far = plain(name, place, epochs)
    assert eager.ended is None, eager.end
    seen, seen_far = train_with(name, place, STRATEGIES[strategy](), epochs)
    if seen.end != eager.end:
        return seen.end
    if seen_far != far:
        return f"advanced: the state is at {seen_far}, plain Lightning's at {far}"
    if (distance := apart(seen.losses, eager.losses)) > 1e-4:
        return f"losses are {distance:.1e} apart: {seen.losses}, plain Lightning's {eager.losses}"
    return None
