"""Snapshot: everything that a training step may change, copied, and put back into the storage that it came from.

Compiled code, CUDA graphs and optimizers hold on to tensors by identity, so that nothing is replaced that can be
filled. Objects are followed however deep they lie; each kind of them has its own way back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from strategies import Program
from strategies.cuda_graph.state import entries_of, refill
from strategies.errors import origin_of
from strategies.loop import Loop
from strategies.optimizer import ATTRIBUTE
from strategies.torch_patches import settle_shards
from trainer.guards.compare import local
from trainer.loops.private import kinds

OFFLOAD_SHARE = 0.1
"""Copies that take more than this share of the device's memory are kept on the host: the passes need the room."""

_SKIPPED = {*vars(nn.Module()), *vars(L.LightningModule()), "_compiled_call_impl"} - {
    *("training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"),
    "_param_requires_grad_state",  # by toggle_optimizer, until its untoggle_optimizer
}
"""Attributes of torch's and Lightning's base classes: hooks, the trainer, compiled calls. A step changes none."""
_OF_OPTIMIZER = {"step", "zero_grad", ATTRIBUTE}
_LIGHTNINGS = (L.Trainer, L.Callback, L.LightningDataModule, Logger)
_NOT_LOOKED_INTO = (Dataset, DataLoader, Sampler, numpy.memmap, io.IOBase)
_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.NoneType)
_RANDOM = (torch.Generator, numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState, random.Random)

PutBack = Callable[[], Any]


Held = tuple[Any, str]
"""An object, and where it was found in words that a user finds again: ``self.sampler.stream``."""


class Snapshot:
    """Taken when it is made: parameters and which of them want gradients, buffers, gradients, optimizers, schedulers,
    gradient scalers, training flags, progress counters, and the batch. So are the attributes of the modules: numbers,
    tensors, arrays, random generators, containers and objects of the user's own classes. They may lie deep, in
    closures, and in globals that the module's methods name. Not copied are data sets, loaders, loggers, callbacks,
    iterators and objects of other libraries.

    ``of_forward``, which no optimizer step follows, leaves out what optimizers keep for each parameter; ``program``,
    whose strategies may keep something on the host, is then not needed.
    """

    def __init__(self, loop: Loop, batch: Any, program: Program | None = None, *, of_forward: bool = False) -> None:
        settle_shards(loop.module)
        module, parameters = loop.module, list(loop.module.parameters())
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._of_forward, self._loop = of_forward, loop
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._found: dict[int, Any] = {}
        self._put_back: list[PutBack] = [partial(settle_shards, module, gradients=not of_forward)]
        self.cannot_restore: list[str] = []
        """What a step may use up and nobody can put back, in words: nothing should be run that would."""
        self._offload = self._too_large([*parameters, *module.buffers()], [] if of_forward else loop.optimizers)
        self._keep(module, "self")
        scripts = [one for one in module.modules() if isinstance(one, torch.jit.ScriptModule)]  # tensors lie in C++
        self._keep([buffer for script in scripts for buffer in script.buffers(recurse=False)], "TorchScript")
        for optimizer in loop.optimizers:
            self._keep(optimizer, "an optimizer")
        for scheduler in loop.schedulers:  # a training step may step it itself
            self._keep(vars(scheduler), "a scheduler")
        for _, gradient in gradients:
            self._keep(gradient, "a gradient")
        for counter in loop.counters():  # of optimizer steps and zeroed gradients; checkpoints hold them
            self._keep(vars(counter), "progress")
        self._keep(batch, "the batch")
        if loop.scaler is not None:
            self._keep(vars(loop.scaler), "the scaler")
        classes = {type(one) for one in module.modules()}
        for owner, name, value in itertools.chain.from_iterable(map(_outside_of, classes)):
            if isinstance(value, int | float | str):
                self._put_back.append(partial(_bind, owner, name, value))
            elif isinstance(owner, dict) and isinstance(value, (*_RANDOM, dict, list, set, deque)):
                self._keep(value, name)  # a global
        self._put_back += [partial(setattr, parameter, "grad", gradient) for parameter, gradient in gradients]
        self._put_back += [partial(_bind, one, "requires_grad", one.requires_grad) for one in parameters]
        held = [(one, one.data) for one in parameters if one.layout is torch.strided and not is_lazy(one)]
        self._put_back += [partial(_give_data, one, data) for one, data in held if type(local(data)) is Tensor]
        self._random = random_state()
        # Last, because it looks at the state that the others have put back.
        self._put_back_last = [strategy.take(program) for strategy in program.strategies] if program else []

    @property
    def lost(self) -> str | None:
        """What would be lost on any process if a step were run that does not count; None where everything can be put
        back. Every process asks."""
        if not self._loop.anywhere(bool(self.cannot_restore)):
            return None
        found = ", ".join(dict.fromkeys(self.cannot_restore)) or "what another process keeps"
        return f"a step may use up {found}, which cannot be put back"

    def of(self, tensor: Tensor) -> Tensor:
        """What ``tensor`` held, on its device; a copy or not, so do not write to it."""
        return self._tensors[id(tensor)][1].to(tensor.device)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, on the host where the device has no room for many."""
        return tensor.detach().to("cpu", copy=True) if self._offload else tensor.detach().clone()

    def forget(self, tensors: Iterable[Tensor | None]) -> None:
        """Free the copies of ``tensors``, whose contents do not come back from now on."""
        for tensor in tensors:
            self._tensors.pop(id(tensor), None)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; can be done any number of times."""
        for put_back in self._put_back:
            put_back()
        for tensor, kept in self._tensors.values():
            tensor.data.copy_(kept)  # the same contents: no graph that a user keeps need know
        set_random_state(self._random)
        for put_back in self._put_back_last:
            put_back()

    def _too_large(self, tensors: list[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        if self._loop.device.type != "cuda":
            return False
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        held = [*tensors, *(value for value in states if isinstance(value, Tensor))]
        total = torch.cuda.get_device_properties(self._loop.device).total_memory
        return sum(tensor.numel() * tensor.element_size() for tensor in held) > OFFLOAD_SHARE * total

    def _keep(self, value: Any, name: str) -> None:
        """Remember the contents of ``value``, which ``name`` calls, and of all that is inside it."""
        waiting = deque([(value, name)] if _deep(value) else [])
        while waiting:  # so that a container comes back before what is put into it
            value, name = waiting.popleft()
            if isinstance(value, Tensor):
                if is_lazy(value):
                    self.cannot_restore.append(f"{name}, a parameter without a shape")
                elif id(value) not in self._tensors:
                    self._tensors[id(value)] = value, self.copy(value)
            elif _is_iterator(value):
                self.cannot_restore.append(f"{name} ({type(value).__name__})")
            elif id(value) not in self._found:
                self._found[id(value)] = value
                put_back, inside = _opened(value, name, self._of_forward)
                if put_back is not None:
                    self._put_back.append(put_back)
                waiting.extend(inside)


# ---- what objects hold, and how each kind of them is put back ----------------------------------------------------


def _opened(value: Any, name: str, of_forward: bool) -> tuple[PutBack | None, list[Held]]:
    """What puts the object itself back to what it is now, if it can change, and what it holds, which is put back on its
    own."""
    put_back: PutBack | None
    if isinstance(value, nn.Module):
        own = {attribute: one for attribute, one in vars(value).items() if attribute not in _SKIPPED}
        return _attributes_restorer(value, own), _items(own, name)
    if isinstance(value, (*kinds(*_LIGHTNINGS), *_NOT_LOOKED_INTO)):
        return None, []
    if isinstance(value, dict):
        return _entries_restorer(value), _items(value, name)
    if isinstance(value, list | deque | set | tuple):
        put_back = None if isinstance(value, tuple) else _entries_restorer(value)
        return put_back, [(one, name) for one in value if _deep(one)]
    if isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy()), []
    if isinstance(value, torch.optim.Optimizer):
        # A count of its own, or an optimizer that it steps; not the step in force, which a rollback may change.
        left_out = _OF_OPTIMIZER | ({"state"} if of_forward else set())
        own = {key: one for key, one in vars(value).items() if key not in left_out and "_hooks" not in key}
        return _attributes_restorer(value, own, vars(value).keys() - own.keys() | _OF_OPTIMIZER), _items(own, name)
    if isinstance(value, partial | types.MethodType | types.FunctionType):
        return None, [(one, name) for one in _bound(value) if _deep(one)]
    attributes = _attributes(value)
    inside = _items(attributes, name)
    if isinstance(value, _RANDOM):
        put_back = _generator_restorer(value)
    elif isinstance(value, LRScheduler | torch.amp.GradScaler) or _is_users(value):
        put_back = _attributes_restorer(value, attributes)
    else:  # an object of a library: its generators alone
        put_back, inside = None, [one for one in inside if isinstance(one[0], _RANDOM)]
    return put_back, inside


def _items(items: Mapping[Any, Any], name: str) -> list[Held]:
    name = name.removesuffix("._modules")
    return [
        # A tensor as a key, of an optimizer's state for instance, would be fetched and printed.
        (one, f"{name}.{key}" if isinstance(key, str | int) else name)
        for key, one in items.items()
        if _deep(one)
    ]


def _outside_of(cls: type) -> Iterator[tuple[Any, str, Any]]:
    """What methods of a user's class may bind anew outside of a module, or change: ``(owner, name, value)``.

    Owners are the dictionaries of globals that they name, the classes themselves, and the cells of closures.
    """
    for base in cls.__mro__:
        if not _is_library(base.__module__):
            yield from ((base, name, value) for name, value in vars(base).items() if not name.startswith("__"))
    for function in _functions_of(cls):
        named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        yield from ((function.__globals__, name, value) for name, value in named.items() if not name.startswith("__"))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield cell, "cell_contents", cell.cell_contents


def _deep(value: Any) -> bool:
    return not isinstance(value, _PLAIN)


def _bind(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif getattr(owner, name, _bind) is not value:
        setattr(owner, name, value)


def _give_data(parameter: nn.Parameter, data: Tensor) -> None:
    """A step may give a parameter another tensor's memory, which compiled code and optimizers do not look at."""
    if local(parameter).data_ptr() != local(data).data_ptr():
        parameter.data = data


def _functions_of(cls: type) -> list[types.FunctionType]:
    """The methods of a user's class, and the user's functions that they call by name, however deep."""
    methods = [one for base in cls.__mro__ if not _is_library(base.__module__) for one in vars(base).values()]
    waiting = [one.fget if isinstance(one, property) else getattr(one, "__func__", one) for one in methods]
    found: dict[int, types.FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.FunctionType) and not _is_library(function.__module__):
            if id(function) not in found:
                waiting += [function.__globals__.get(name) for name in function.__code__.co_names]
            found[id(function)] = function
    return list(found.values())


def _is_iterator(value: Any) -> bool:
    """Whether it is used up by looking, so that nobody can put it back, and is no iterator of the user's own class."""
    if isinstance(value, io.IOBase):  # one that is read; a log may have a line more
        return not value.closed and value.readable() and not value.writable()
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is not None
    return hasattr(type(value), "__next__") and not (_is_users(value) and _attributes(value))


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is installed or ours, and not the user's own code."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return str(module).partition(".")[0] in sys.stdlib_module_names
    return "-packages" in file or origin_of(file) != "other"


def _is_users(value: Any) -> bool:
    """Whether it is an object of a user's class, or a record."""
    record = isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value)
    return record or not _is_library(type(value).__module__)


def _bound(value: Any) -> list[Any]:
    """What a user's function, a method or a partial has bound."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if _is_library(value.__globals__.get("__name__", "")):
        return []
    bound = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            bound.append(cell.cell_contents)
    return bound


def _attributes(value: Any) -> dict[str, Any]:
    slots: Iterable[str] = itertools.chain.from_iterable(
        (own,) if isinstance(own := vars(base).get("__slots__", ()), str) else own for base in type(value).__mro__
    )
    found = {slot: getattr(value, slot) for slot in slots if not slot.startswith("__") and hasattr(value, slot)}
    return {**found, **getattr(value, "__dict__", {})}


def _attributes_restorer(value: Any, before: dict[str, Any], but: Iterable[str] = ()) -> PutBack:
    skipped = _SKIPPED if isinstance(value, nn.Module) else set(but)
    in_slots = before.keys() - vars(value).keys() if hasattr(value, "__dict__") else before.keys()

    def put_back() -> None:
        now = _attributes(value)
        for name in now.keys() - before.keys() - skipped:
            object.__delattr__(value, name)
        for name, kept in before.items():
            if now.get(name, _deep) is kept:
                continue
            if name in in_slots:
                object.__setattr__(value, name, kept)
            else:
                vars(value)[name] = kept

    return put_back


def _entries_restorer(value: Any) -> PutBack:
    before = entries_of(value)

    def put_back() -> None:
        # Left alone where nothing changed: compiled code may have looked at its version.
        now = entries_of(value)
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            refill(value, before)

    return put_back


def _generator_restorer(value: Any) -> PutBack:
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", copy.deepcopy(value.state))
    return partial(value.set_state, value.get_state())


# ---- random numbers ----------------------------------------------------------------------------------------------


def random_state() -> tuple[Any, ...]:
    """State of Python's, NumPy's and torch's random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), copy.deepcopy(numpy.random.get_state()), torch.get_rng_state(), cuda


def drew_random_numbers(before: tuple[Any, ...]) -> bool:
    """Whether any generator has moved since ``before``, a ``random_state()``."""
    (python, array, host, cuda), now = before, random_state()
    moved = now[0] != python or now[1][2] != array[2] or not numpy.array_equal(now[1][1], array[1])
    return moved or not all(
        torch.equal(one, other) for one, other in zip([host, *cuda], [now[2], *now[3]], strict=True)
    )


def set_random_state(state: tuple[Any, ...]) -> None:
    python, array, host, cuda = state
    random.setstate(python)
    numpy.random.set_state(array)
    torch.set_rng_state(host)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
