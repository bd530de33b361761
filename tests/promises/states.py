"""Kinds of state that ordinary Python code keeps, each with one way to advance it; how many a training leaves advanced:

python -m tests.promises.states [KIND ...]
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import heapq
import io
import itertools
import logging
import mmap
import multiprocessing
import os
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy
import torch
from crucible import Regional, Strategy, Whole
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.promises.training import WIDTH, Block, Module, Net, Outcome, apart, train, vectors
from tests.trainer.recording import RecordedNetwork

Advance = Callable[[Any], float]
"""Given the module that owns it: advances the state by one and returns a number that says how far it is."""
KINDS: dict[str, Callable[[Any], Advance]] = {}
"""By name: given a module, puts the state at its beginning and returns what advances it."""
OF_THE_TRAINING: set[str] = set()
"""Those that need more than a module: a trainer, and what it holds."""


def kind(make: Callable[[Any], Advance]) -> Callable[[Any], Advance]:
    KINDS[make.__name__.replace("_", " ").strip()] = make
    return make


def of_the_training(make: Callable[[Any], Advance]) -> Callable[[Any], Advance]:
    OF_THE_TRAINING.add(make.__name__.replace("_", " ").strip())
    return kind(make)


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
def list_in_a_closure(_: Any) -> Advance:
    seen: list[int] = []

    def advance(_: Any) -> float:
        seen.append(1)
        return len(seen)

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
def partial_of_a_list(_: Any) -> Advance:
    def append(seen: list[int], _: Any) -> float:
        seen.append(1)
        return len(seen)

    return functools.partial(append, [])


@kind
def generator_object(_: Any) -> Advance:
    def count() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    made = count()
    return lambda _: next(made)


@kind
def generator_that_is_sent_to(_: Any) -> Advance:
    def count() -> Any:
        total = 0.0
        while True:
            total += yield total

    made = count()
    next(made)
    return lambda _: made.send(1.0)


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


@kind
def counter_of_itertools(_: Any) -> Advance:
    made = itertools.count(1)
    return lambda _: next(made)


@kind
def cycle_of_itertools(_: Any) -> Advance:
    made = itertools.cycle(range(1, 200))
    return lambda _: next(made)


@kind
def accumulation_of_itertools(_: Any) -> Advance:
    made = itertools.accumulate(itertools.repeat(1))
    return lambda _: next(made)


@kind
def iterator_of_a_list(_: Any) -> Advance:
    made = iter(list(range(1, 300)))
    return lambda _: next(made)


@kind
def iterator_of_a_dictionary(_: Any) -> Advance:
    made = iter(dict.fromkeys(range(1, 300)))
    return lambda _: next(made)


@kind
def zip_and_enumerate(_: Any) -> Advance:
    made = enumerate(zip(range(300), range(300), strict=True), 1)
    return lambda _: next(made)[0]


@kind
def memo(_: Any) -> Advance:
    @functools.cache
    def remembered(number: int) -> int:
        return number

    def advance(_: Any) -> float:
        remembered(remembered.cache_info().currsize)
        return remembered.cache_info().currsize

    return advance


@kind
def local_in_a_frame_of_a_class(_: Any) -> Advance:
    class Callable_:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, _: Any) -> float:
            self.count += 1
            return self.count

    return Callable_()


@kind
def object_of_a_bound_method(_: Any) -> Advance:
    class Owner:
        count = 0

        def advance(self, _: Any) -> float:
            self.count += 1
            return self.count

    return Owner().advance


# ---- globals and classes --------------------------------------------------------------------------------------------

GLOBAL = 0
GLOBAL_DICTIONARY: dict[str, int] = {}
GLOBAL_LIST: list[int] = []
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
def global_dictionary(_: Any) -> Advance:
    def advance(_: Any) -> float:
        GLOBAL_DICTIONARY["count"] += 1
        return GLOBAL_DICTIONARY["count"]

    GLOBAL_DICTIONARY["count"] = 0
    return advance


@kind
def global_list(_: Any) -> Advance:
    def advance(_: Any) -> float:
        GLOBAL_LIST.append(1)
        return len(GLOBAL_LIST)

    GLOBAL_LIST.clear()
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
def environment(_: Any) -> Advance:
    os.environ["TESTS_PROMISES"] = "0"

    def advance(_: Any) -> float:
        os.environ["TESTS_PROMISES"] = str(int(os.environ["TESTS_PROMISES"]) + 1)
        return int(os.environ["TESTS_PROMISES"])

    return advance


@kind
def class_attribute(_: Any) -> Advance:
    class Holder:
        count = 0

    def advance(_: Any) -> float:
        Holder.count += 1
        return Holder.count

    return advance


@kind
def class_list(_: Any) -> Advance:
    class Holder:
        seen: list[int] = []

    def advance(_: Any) -> float:
        Holder.seen.append(1)
        return len(Holder.seen)

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


@kind
def enumeration_member(_: Any) -> Advance:
    class Phase(enum.Enum):
        FIRST = "first"

    Phase.FIRST.count = 0  # type: ignore[attr-defined]

    def advance(_: Any) -> float:
        Phase.FIRST.count += 1  # type: ignore[attr-defined]
        return Phase.FIRST.count  # type: ignore[attr-defined]

    return advance


@kind
def property_with_state(_: Any) -> Advance:
    class Holder:
        def __init__(self) -> None:
            self._count = 0

        @property
        def count(self) -> int:
            self._count += 1
            return self._count

    held = Holder()
    return lambda _: held.count


@kind
def descriptor(_: Any) -> Advance:
    class Counts:
        def __init__(self) -> None:
            self.counts: dict[int, int] = collections.defaultdict(int)

        def __get__(self, owner: Any, kind: Any = None) -> int:
            self.counts[id(owner)] += 1
            return self.counts[id(owner)]

    class Holder:
        count = Counts()

    held = Holder()
    return lambda _: held.count


@kind
def attribute_made_on_demand(_: Any) -> Advance:
    class Holder:
        def __getattr__(self, name: str) -> int:
            self.__dict__["made"] = self.__dict__.get("made", 0) + 1
            return self.__dict__["made"]

    held = Holder()
    return lambda _: held.anything


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
    return lambda held: setattr(held, name, getattr(held, name) + 1)


class OwnDictionary(dict[str, int]):
    pass


class OwnList(list[int]):
    pass


@dataclasses.dataclass
class Data:
    count: int = 0


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


for given in (
    ("queue", queue.Queue, lambda held: held.put(1), lambda held: held.qsize()),
    ("simple queue", queue.SimpleQueue, lambda held: held.put(1), lambda held: held.qsize()),
    ("deque", collections.deque, lambda held: held.append(1), len),
    ("deque that turns", lambda: collections.deque(range(9)), lambda held: held.rotate(1), lambda held: held[0]),
    ("chain map", lambda: collections.ChainMap({"count": 0}), incremented, lambda held: held["count"]),
    ("counter", collections.Counter, lambda held: held.update("a"), lambda held: held["a"]),
    ("ordered dictionary", lambda: collections.OrderedDict(count=0), incremented, lambda held: held["count"]),
    ("default dictionary", lambda: collections.defaultdict(int), incremented, lambda held: held["count"]),
    ("dictionary's subclass", lambda: OwnDictionary(count=0), incremented, lambda held: held["count"]),
    ("user dictionary", lambda: collections.UserDict(count=0), incremented, lambda held: held["count"]),
    ("list's subclass", OwnList, lambda held: held.append(1), len),
    ("heap", list, lambda held: heapq.heappush(held, -len(held)), lambda held: -held[0]),
    ("byte array", bytearray, lambda held: held.append(1), len),
    ("array of array", lambda: array.array("d", [0.0]), lambda held: held.__setitem__(0, held[0] + 1), lambda h: h[0]),
    ("memory view", lambda: memoryview(bytearray(1)), lambda held: held.__setitem__(0, held[0] + 1), lambda h: h[0]),
    ("memory map", lambda: mmap.mmap(-1, 8), lambda held: held.__setitem__(0, held[0] + 1), lambda h: h[0]),
    ("number of ctypes", lambda: ctypes.c_int(0), add_to("value"), lambda held: held.value),
    ("shared number", lambda: multiprocessing.Value("i", 0), add_to("value"), lambda held: held.value),
    ("numpy array", lambda: numpy.zeros(3), lambda held: held.__iadd__(1), lambda held: float(held[0])),
    ("data class", Data, add_to("count"), lambda held: held.count),
    ("data class with slots", SlottedData, add_to("count"), lambda held: held.count),
    ("object with slots", Slots, add_to("count"), lambda held: held.count),
    ("namespace", lambda: types.SimpleNamespace(count=0), add_to("count"), lambda held: held.count),
    ("thread's own", threading.local, lambda h: setattr(h, "n", getattr(h, "n", 0) + 1), lambda held: held.n),
    ("text file in memory", io.StringIO, lambda held: held.write("a"), lambda held: held.tell()),
    ("binary file in memory", lambda: io.BytesIO(bytes(300)), lambda held: held.read(1), lambda held: held.tell()),
    ("set of names", set, lambda held: held.add(len(held)), len),
    ("nested", lambda: {"a": [{"count": 0}]}, lambda held: incremented(held["a"][0]), lambda h: h["a"][0]["count"]),
    ("exception's notes", ValueError, lambda held: held.add_note("a"), lambda held: len(held.__notes__)),
    ("tuple of a list", lambda: ([],), lambda held: held[0].append(1), lambda held: len(held[0])),
):
    container(*given)  # type: ignore[arg-type]


@kind
def frozen_data_class_that_is_replaced(module: Any) -> Advance:
    module.frozen = FrozenData()

    def advance(owner: Any) -> float:
        owner.frozen = dataclasses.replace(owner.frozen, count=owner.frozen.count + 1)
        return owner.frozen.count

    return advance


@kind
def weakly_referenced_object(module: Any) -> Advance:
    held = Slots()
    reference = weakref.ref(held)
    KEPT.append(held)

    def advance(_: Any) -> float:
        found = reference()
        assert found is not None
        found.count += 1
        return found.count

    return advance


KEPT: list[Any] = []


@kind
def weak_dictionary(_: Any) -> Advance:
    held, by = Slots(), weakref.WeakKeyDictionary[Any, int]()
    by[held] = 0

    def advance(_: Any) -> float:
        by[held] += 1
        return by[held]

    return advance


@kind
def proxied_mapping(_: Any) -> Advance:
    behind = {"count": 0}
    seen = types.MappingProxyType(behind)

    def advance(_: Any) -> float:
        behind["count"] += 1
        return seen["count"]

    return advance


@kind
def context_variable(_: Any) -> Advance:
    variable = contextvars.ContextVar("tests_promises", default=0)

    def advance(_: Any) -> float:
        variable.set(variable.get() + 1)
        return variable.get()

    return advance


@kind
def data_base_in_memory(_: Any) -> Advance:
    base = sqlite3.connect(":memory:")
    base.execute("create table seen (number integer)")

    def advance(_: Any) -> float:
        base.execute("insert into seen values (1)")
        return base.execute("select count(*) from seen").fetchone()[0]

    return advance


@kind
def file_that_is_read(_: Any) -> Advance:
    file: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115
    file.write("\n".join(str(number) for number in range(1, 300)))
    file.seek(0)
    return lambda _: float(file.readline())


@kind
def file_that_is_written(_: Any) -> Advance:
    file: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def advance(_: Any) -> float:
        file.write("a")
        return file.tell()

    return advance


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


@kind
def object_under_a_lock(_: Any) -> Advance:
    lock, held = threading.Lock(), Plain()

    def advance(_: Any) -> float:
        with lock:
            held.count += 1
            return held.count

    return advance


@kind
def counter_of_another_thread(_: Any) -> Advance:
    held = Plain()

    def advance(_: Any) -> float:
        thread = threading.Thread(target=add_to("count"), args=(held,))
        thread.start()
        thread.join()
        return held.count

    return advance


# ---- random numbers -------------------------------------------------------------------------------------------------


@kind
def random_generator_of_ones_own(_: Any) -> Advance:
    made = random.Random(0)
    return lambda _: made.random()


@kind
def random_numbers_of_python(_: Any) -> Advance:
    random.seed(0)
    return lambda _: random.random()


@kind
def generator_of_numpy(_: Any) -> Advance:
    made = numpy.random.default_rng(0)
    return lambda _: float(made.random())


@kind
def random_numbers_of_numpy(_: Any) -> Advance:
    numpy.random.seed(0)
    return lambda _: float(numpy.random.rand())


@kind
def generator_of_torch(_: Any) -> Advance:
    made = torch.Generator().manual_seed(0)
    return lambda _: float(torch.rand((), generator=made))


@kind
def random_numbers_of_torch(_: Any) -> Advance:
    return lambda _: float(torch.rand(()))


# ---- modules and tensors --------------------------------------------------------------------------------------------


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
    ("module's number with a point", lambda: 0.0, add_to("held"), lambda owner: owner.held),
    ("module's word", lambda: "", lambda o: setattr(o, "held", o.held + "a"), lambda o: len(o.held)),
    ("module's tuple", tuple, lambda o: setattr(o, "held", (*o.held, 1)), lambda o: len(o.held)),
    ("module's list", list, lambda owner: owner.held.append(1), lambda owner: len(owner.held)),
    ("module's set", set, lambda owner: owner.held.add(len(owner.held)), lambda owner: len(owner.held)),
    ("module's dictionary", lambda: {"count": 0}, lambda o: incremented(o.held), lambda o: o.held["count"]),
    ("module's object", Plain, lambda owner: add_to("count")(owner.held), lambda owner: owner.held.count),
    ("module's deque", collections.deque, lambda owner: owner.held.append(1), lambda owner: len(owner.held)),
    ("module's tensor", lambda: torch.zeros(()), lambda o: o.held.add_(1), lambda o: float(o.held)),
    ("module's tensor replaced", lambda: torch.zeros(()), add_to("held"), lambda owner: float(owner.held)),
    ("module's decimal", lambda: decimal.Decimal(0), add_to("held"), lambda owner: float(owner.held)),
    ("module's tensors in a list", lambda: [torch.zeros(())], lambda o: o.held[0].add_(1), lambda o: float(o.held[0])),
    ("module that holds a number", nn.Identity, lambda o: add_to_held(o.held), lambda o: o.held.count),
):
    attribute(*given)  # type: ignore[arg-type]


def add_to_held(held: Any) -> None:
    held.count = getattr(held, "count", 0) + 1


@kind
def attribute_that_begins_later(_: Any) -> Advance:
    def advance(owner: Any) -> float:
        owner.begun = getattr(owner, "begun", 0) + 1
        return owner.begun

    return advance


@kind
def buffer(module: Any) -> Advance:
    module.register_buffer("counted", torch.zeros(()))

    def advance(owner: Any) -> float:
        owner.counted.add_(1)
        return float(owner.counted)

    return advance


@kind
def buffer_that_is_replaced(module: Any) -> Advance:
    module.register_buffer("counted", torch.zeros(()), persistent=False)

    def advance(owner: Any) -> float:
        owner.counted = owner.counted + 1
        return float(owner.counted)

    return advance


@kind
def attribute_of_a_parameter(module: Any) -> Advance:
    next(module.parameters()).count = 0  # type: ignore[attr-defined]

    def advance(owner: Any) -> float:
        parameter = next(owner.parameters())
        parameter.count += 1
        return parameter.count

    return advance


@kind
def global_tensor(_: Any) -> Advance:
    GLOBAL_TENSOR.zero_()

    def advance(_: Any) -> float:
        GLOBAL_TENSOR.add_(1)
        return float(GLOBAL_TENSOR)

    return advance


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


# ---- what a training holds ------------------------------------------------------------------------------------------


class CountingCallback(L.Callback):
    count = 0


class CountingLogger(Logger):
    count = 0
    name, version = "counting", 0

    def log_hyperparams(self, *given: Any, **named: Any) -> None:
        pass

    def log_metrics(self, *given: Any, **named: Any) -> None:
        pass


class Vectors(Dataset[Tensor]):
    count = 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def holder(name: str, find: Callable[[Any], Any]) -> None:
    def make(_: Any) -> Advance:
        def advance(owner: Any) -> float:
            held = find(owner)
            held.tests_count = getattr(held, "tests_count", 0) + 1
            return held.tests_count

        return advance

    KINDS[name] = make
    OF_THE_TRAINING.add(name)


for name, find in (
    ("trainer's attribute", lambda owner: owner.trainer),
    ("callback's attribute", lambda owner: owner.trainer.callbacks[1]),
    ("optimizer's attribute", lambda owner: owner.trainer.optimizers[0]),
    ("scheduler's attribute", lambda owner: owner.trainer.lr_scheduler_configs[0].scheduler),
    ("logger's attribute", lambda owner: owner.trainer.logger),
    ("strategy's attribute", lambda owner: owner.trainer.strategy),
    ("data set's attribute", lambda owner: owner.trainer.train_dataloader.dataset),
    ("loader's attribute", lambda owner: owner.trainer.train_dataloader),
    ("loop's attribute", lambda owner: owner.trainer.fit_loop),
    ("hyperparameters' attribute", lambda owner: owner.hparams),
):
    holder(name, find)


@of_the_training
def entry_of_a_parameter_group(_: Any) -> Advance:
    def advance(owner: Any) -> float:
        group = owner.trainer.optimizers[0].param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        return group["seen"]

    return advance


@of_the_training
def state_of_the_optimizer(_: Any) -> Advance:
    def advance(owner: Any) -> float:
        state = owner.trainer.optimizers[0].state["tests"]
        state["seen"] = state.get("seen", 0) + 1
        return state["seen"]

    return advance


# ---- trainings ------------------------------------------------------------------------------------------------------

PLACES = ("training_step", "validation_step", "hook", "block")


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
        self.save_hyperparameters({"scale": 1.0})
        self.place, self.value = place, 0.0
        self.advance: Any = None if place == "block" else make(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.place == "training_step":
            self.value = self.advance(self)
        return self.loss(batch) * (1.0 + 0.1 * self.value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.place == "validation_step":
            self.value = self.advance(self)
        self.log("val_loss", self.loss(batch))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.place == "hook":
            self.value = self.advance(self)

    def final(self) -> list[float]:
        """How far the state is, by advancing it once more."""
        if self.place == "block":
            return [float(block.advance(block)) for block in self.net.blocks]
        return [float(self.advance(self))]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


def train_with(name: str, place: str, strategies: list[Strategy] | None) -> tuple[Outcome, list[float]]:
    """Train six steps with validations; what came, and how far the state is in the end."""
    final: list[float] = []
    outcome = train(
        lambda: Counting(name, place),
        strategies,
        data=DataLoader(Vectors(), batch_size=8),
        validation=vectors(2, seed=1),
        val_check_interval=2,
        callbacks=[CountingCallback()],
        logger=CountingLogger(),
        then=lambda _, module: final.extend(module.final()),
    )
    return outcome, final


STRATEGIES: dict[str, Callable[[], list[Strategy]]] = {
    "regional": lambda: [Regional(backend="eager")],
    "whole": lambda: [Whole(backend="eager")],
    "network": lambda: [RecordedNetwork()],
}


@functools.lru_cache(maxsize=1)
def plain(name: str, place: str) -> tuple[Outcome, list[float]]:
    """Plain Lightning's training, which those under strategies follow."""
    return train_with(name, place, None)


def difference(name: str, place: str, strategy: str) -> str | None:
    """How a training under a strategy is not plain Lightning's; None where it is."""
    eager, far = plain(name, place)
    assert eager.ended is None, eager.end
    seen, seen_far = train_with(name, place, STRATEGIES[strategy]())
    if seen.end != eager.end:
        return seen.end
    if seen_far != far:
        return f"advanced: the state is at {seen_far}, plain Lightning's at {far}"
    if (distance := apart(seen.losses, eager.losses)) > 1e-4:
        return f"losses are {distance:.1e} apart: {seen.losses}, plain Lightning's {eager.losses}"
    return None


def main(names: list[str]) -> None:
    """Print what is advanced, and the number."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    wrong = tried = 0
    for name in names or KINDS:
        for place in PLACES:
            if place == "block" and name in OF_THE_TRAINING:
                continue
            for strategy in STRATEGIES:
                tried += 1
                if (what := difference(name, place, strategy)) is not None:
                    wrong += 1
                    print(f"{name}, in {place}, under {strategy}: {what}", flush=True)
    print(f"RESULT {len(KINDS)} kinds of state, {tried} trainings, {wrong} not as plain Lightning leaves them")


if __name__ == "__main__":
    main(sys.argv[1:])
