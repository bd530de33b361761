"""Held: what objects hold that a training step may change or use up, and how each kind of them is put back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

_LIBRARIES = {"strategies", "trainer", *sys.stdlib_module_names}
"""Not the user's own, as is all that is installed. Ours are meant to remember the passes."""
_NOT_LOOKED_INTO = (L.Trainer, L.Callback, L.LightningDataModule, Logger, Dataset, DataLoader, Sampler, numpy.memmap)
_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.NoneType)
_RANDOM = (torch.Generator, numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState, Random)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """An object where it was found."""

    value: Any
    name: str
    """In words that a user finds again: ``self.sampler.stream``."""
    put: Callable[[Any], None] | None = None
    """Puts another object into its place; None where that is not possible."""


def restorer(value: Any) -> Callable[[], None] | None:
    """Puts ``value`` itself back to what it is now, not what it holds; None for what nobody looks into."""
    if isinstance(value, _PLAIN + _NOT_LOOKED_INTO):
        return None
    if isinstance(value, dict):
        return _dict_restorer(value)
    if isinstance(value, list | deque):
        return _sequence_restorer(value)
    if isinstance(value, set):
        return _set_restorer(value)
    if isinstance(value, numpy.ndarray):
        return _array_restorer(value)
    if isinstance(value, _RANDOM):
        return _generator_restorer(value)
    if isinstance(value, io.IOBase):
        return _place_restorer(value) if _is_read(value) else None
    if isinstance(value, tuple | torch.optim.Optimizer | functools.partial | types.MethodType | types.FunctionType):
        return nothing
    if isinstance(value, LRScheduler | torch.amp.GradScaler) or _is_users(value):
        return _attributes_restorer(value)
    return nothing if any(isinstance(one, _RANDOM) for one in _attributes(value).values()) else None


def held_by(held: Held) -> list[Held]:
    """What an object that has a ``restorer`` holds."""
    value, name = held.value, held.name
    if isinstance(value, dict):
        return items_of(value, value, name)
    if isinstance(value, list | deque):
        return [Held(one, name, functools.partial(value.__setitem__, at)) for at, one in enumerate(value) if _deep(one)]
    if isinstance(value, tuple | set):
        return [Held(one, name) for one in value if _deep(one)]
    if isinstance(value, torch.optim.Optimizer):
        # Not what else it holds: the step in force may be another one after a rollback.
        return [Held(value.param_groups, name), Held(value.state, name)]
    if isinstance(value, functools.partial | types.MethodType | types.FunctionType):
        return [Held(one, name) for one in _bound(value) if _deep(one)]
    owned = isinstance(value, LRScheduler | torch.amp.GradScaler) or _is_users(value)
    return [
        Held(one, f"{name}.{attribute}", functools.partial(object.__setattr__, value, attribute))
        for attribute, one in _attributes(value).items()
        if (_deep(one) if owned else isinstance(one, _RANDOM))
    ]


def items_of(container: dict[str, Any], items: Mapping[Any, Any], name: str) -> list[Held]:
    """``items`` of a dictionary, of a module's attributes for instance."""
    return [
        # A tensor as a key, of an optimizer's state for instance, would be fetched and printed.
        Held(
            one, f"{name}.{key}" if isinstance(key, str | int) else name, functools.partial(container.__setitem__, key)
        )
        for key, one in items.items()
        if _deep(one)
    ]


def held_by_module(module: nn.Module, name: str) -> Iterator[Held]:
    """Submodules, and what may change among the globals that a user's class names: generators, containers."""
    for child, submodule in module._modules.items():
        if submodule is not None:
            yield Held(submodule, f"{name}.{child}")
    for function in _functions_of(type(module)):
        named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        yield from (
            Held(one, name) for name, one in named.items() if isinstance(one, (*_RANDOM, dict, list, set, deque))
        )


def outside_of(modules: Iterable[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Plain values that methods of the user's classes may bind anew outside of a module: ``(owner, name, value)``.

    Owners are the dictionaries of globals that they name, the classes themselves, and the cells of closures.
    """
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for cls in {type(module) for module in modules}:
        for base in cls.__mro__:
            if not _is_library(base.__module__):
                for name, value in vars(base).items():
                    if isinstance(value, int | float | str) and not name.startswith("__"):
                        found[id(base), name] = base, name, value
        for function in _functions_of(cls):
            for name in function.__code__.co_names:
                if isinstance(value := function.__globals__.get(name), int | float | str):
                    found[id(function.__globals__), name] = function.__globals__, name, value
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    if isinstance(cell.cell_contents, int | float | str):
                        found[id(cell), "cell_contents"] = cell, "cell_contents", cell.cell_contents
    return list(found.values())


def _functions_of(cls: type) -> list[types.FunctionType]:
    """The methods of a user's class, and the user's functions that they call by name, however deep."""
    methods = [one for base in cls.__mro__ if not _is_library(base.__module__) for one in vars(base).values()]
    waiting = [one.fget if isinstance(one, property) else getattr(one, "__func__", one) for one in methods]
    found: dict[int, types.FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in found or _is_library(function.__module__):
            continue
        found[id(function)] = function
        waiting += [function.__globals__.get(name) for name in function.__code__.co_names]
    return list(found.values())


def is_iterator(value: Any) -> bool:
    """Whether it is used up by looking, and is neither a file nor an iterator of the user's own class."""
    if isinstance(value, io.IOBase):
        return value.closed is False and value.readable() and not value.writable() and not _is_read(value)
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is not None
    return hasattr(type(value), "__next__") and not (_is_users(value) and _attributes(value))


def copied(iterator: Any) -> Any:
    """Another iterator that stands at the same place; None where there is no way to make one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # those of itertools lose this with Python 3.14
        try:
            if type(iterator).__module__ not in ("builtins", "itertools"):
                return None
            kind, arguments, *state = iterator.__reduce__()
            inner = [copied(each) if is_iterator(each) else each for each in arguments]
            if any(one is None and before is not None for one, before in zip(inner, arguments, strict=True)):
                return None
            made = kind(*inner)
            if state and state[0] is not None:
                # A cycle keeps appending to the list in its state.
                parts = isinstance(state[0], tuple)
                made.__setstate__(tuple(map(copy.copy, state[0])) if parts else state[0])
        except (TypeError, AttributeError):
            return None
    return made


def nothing() -> None:
    """It cannot change, or must not be put back; what it holds has a restorer of its own."""


def _deep(value: Any) -> bool:
    return not isinstance(value, _PLAIN)


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module is installed, and not the user's own code."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in _LIBRARIES or "site-packages" in file or "dist-packages" in file


def _is_users(value: Any) -> bool:
    """Whether it is an object of a user's class, or a record."""
    kind = type(value)
    return (
        not _is_library(kind.__module__) or isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value)
    )


def _is_read(file: io.IOBase) -> bool:
    """Whether a file is read, and where it stands can be put back."""
    try:
        return not file.closed and file.readable() and not file.writable() and file.seekable() and file.tell() >= 0
    except (OSError, ValueError):
        return False


def _bound(value: Any) -> list[Any]:
    """What a user's function, a method or a partial has bound."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if _is_library(value.__globals__.get("__name__", "")):
        return []
    bound = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        try:
            bound.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    return bound


def _attributes(value: Any) -> dict[str, Any]:
    """By name, those in slots too."""
    slots: Iterable[str] = itertools.chain.from_iterable(
        (own,) if isinstance(own := vars(base).get("__slots__", ()), str) else own for base in type(value).__mro__
    )
    found = {slot: getattr(value, slot) for slot in slots if not slot.startswith("__") and hasattr(value, slot)}
    return {**found, **getattr(value, "__dict__", {})}


def _attributes_restorer(value: Any) -> Callable[[], None]:
    before = _attributes(value)

    def put_back() -> None:
        now = _attributes(value)
        for name in now.keys() - before.keys():
            object.__delattr__(value, name)
        for name, kept in before.items():
            if name not in now or now[name] is not kept:
                object.__setattr__(value, name, kept)

    return put_back


def _dict_restorer(value: dict[Any, Any]) -> Callable[[], None]:
    before = dict(value)

    def put_back() -> None:
        # Left alone where nothing changed: compiled code may have looked at its version.
        if list(value) != list(before) or any(value[key] is not before[key] for key in before):
            value.clear()
            value.update(before)

    return put_back


def _sequence_restorer(value: Any) -> Callable[[], None]:
    before = list(value)

    def put_back() -> None:
        if len(value) != len(before) or any(now is not then for now, then in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return put_back


def _set_restorer(value: set[Any]) -> Callable[[], None]:
    before = set(value)

    def put_back() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return put_back


def _array_restorer(value: numpy.ndarray[Any, Any]) -> Callable[[], None]:
    before = value.copy()

    def put_back() -> None:
        value[...] = before

    return put_back


def _place_restorer(file: io.IOBase) -> Callable[[], None]:
    place = file.tell()

    def put_back() -> None:
        file.seek(place)

    return put_back


def _generator_restorer(value: Any) -> Callable[[], None]:
    if isinstance(value, numpy.random.Generator):
        return _generator_restorer(value.bit_generator)
    if isinstance(value, numpy.random.BitGenerator):
        return functools.partial(setattr, value, "state", copy.deepcopy(value.state))
    if isinstance(value, Random):
        return functools.partial(value.setstate, value.getstate())
    return functools.partial(value.set_state, value.get_state())
