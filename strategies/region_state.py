"""What the forward of a region may change beside its outputs, copied before it runs once more, and put back afterwards.

Compiled code holds on to tensors by identity, so that nothing is replaced that can be filled. Objects are followed
however deep they lie: attributes of the modules, closures, globals that their methods name, what hooks hold, and the
arguments of the call (a cache of keys and values). What is used up by looking, such as an iterator, cannot be put back.

What lies outside of the region's own modules is copied within bounds. Of a container or a graph of objects beyond them
the compiler says what changes, as of what nobody can copy. An array or tensor beyond them is looked at before and after
the forward instead: see ``Large``.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import functools
import inspect
import io
import itertools
import mmap
import operator
import os
import queue
import random
import sqlite3
import sys
import threading
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from strategies.compile_errors import origin_of

_SKIPPED = {*vars(nn.Module()), "_compiled_call_impl"} - {
    *("training", "_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
}
"""Attributes of torch's base class that a forward does not change."""
MOST_OBJECTS = 20_000
"""Objects that are followed, beside those that a region's modules consist of."""
_OF_A_MODULE = 16
"""Objects that each module consists of: itself and its dictionaries."""
MOST_BYTES = 256 << 20
"""Of arrays, tensors, texts and containers that are copied, beside the region's own weights and buffers."""
_OF_AN_ENTRY = 64
"""Bytes that an entry of a container counts for: it is looked at again after each run."""
FEW = 64
"""Entries of a container up to which those that are exact are compared, beside their count."""
_ROW, _AT_ONCE = 1024, 4096
"""Words of eight bytes that one number of a ``Large`` stands for, and how many of these a GPU makes together."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_LOOKED_INTO = (Dataset, DataLoader, Sampler, numpy.memmap, torch.optim.Optimizer)
_FRAMEWORKS = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch.distributed.")
"""Packages whose trainers, loggers and shards a module may hold: nothing that a region's forward writes to."""
_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, types.NoneType, torch.device, torch.dtype)
_RANDOM = (torch.Generator, numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState, random.Random)

_CONTAINERS: tuple[type, ...] = (
    *_RANDOM,
    dict,
    list,
    set,
    deque,
    ChainMap,
    UserDict,
    UserList,
    type(os.environ),
    numpy.ndarray,
)
_COUNTED = (dict, list, deque, set, tuple)
_BYTES: tuple[type, ...] = (bytearray, array.array, memoryview, io.StringIO, io.BytesIO)
_CLOSED: tuple[type, ...] = (
    *(queue.Queue, queue.SimpleQueue, sqlite3.Connection, sqlite3.Cursor, io.IOBase, mmap.mmap, threading.local),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, SynchronizedBase, functools._lru_cache_wrapper),
    *(types.CoroutineType, types.AsyncGeneratorType),
)
"""Objects whose insides nobody can put back, or not without harm to another thread."""

_OF_DYNAMO = "_dynamo_"
_OF_THREADS = (threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)

PutBack = Callable[[], Any]
Changed = tuple[Any, list[str], Callable[[], Any] | None]
"""An object (None: the globals of the user's functions), the names of those of its attributes that change, and how
it is found by a global's name, which may be bound to another one by the next call; None where it has none."""
Held = tuple[Any, str]
"""An object, and where it was found in words that a user finds again: ``self.sampler.stream``."""


@dataclasses.dataclass(slots=True)
class Large:
    """An array or a tensor that is too large to be copied, and what it held: weighted sums of its words."""

    name: str
    value: Tensor | numpy.ndarray[Any, Any]
    sums: Tensor
    last: bytes

    def __str__(self) -> str:
        return f"{self.name} ({_shown(self.value.nbytes)})"

    def changed(self) -> bool:
        """Whether it holds something else now."""
        now = _large(self.name, self.value)
        return now is None or not torch.equal(now.sums, self.sums) or now.last != self.last


class RegionState:
    """Taken when it is made: buffers, training flags, attributes of ``module`` and its submodules, what its hooks and
    methods hold outside of it, and the random state of the process. ``arguments`` are those of the call: objects
    among them are put back as well, and tensors that only they hold; of all others each run is given copies.
    ``changed``: what else is put back, and to which ``remember`` adds."""

    def __init__(self, module: nn.Module, arguments: Any = (), changed: list[Changed] | None = None) -> None:
        self._found: dict[int, Any] = {}
        self._too_large: dict[int, Any] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        """Of tensors that are put back: what an earlier call of the step has saved for its backward has to find them
        unchanged."""
        self._put_back: list[PutBack] = []
        self._watched: list[Held] = []
        self._restored: set[int] = set()
        self._bound: set[tuple[int, str]] = set()
        self._given = {id(one) for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)}
        self.cannot_restore: list[str] = []
        """What a forward may use up and nobody can put back, in words."""
        self.may_change: list[str] = []
        """What a forward may change and nobody can put back, in words: no matter where the compiler sees all of it."""
        self.large: list[Large] = []
        """What is not copied, and has to be looked at after a forward."""
        modules, buffers = list(module.modules()), list(module.buffers())
        self._objects_left = MOST_OBJECTS + _OF_A_MODULE * len(modules)
        self._bytes_left = MOST_BYTES
        self._buffers = {id(one) for one in buffers}
        self._parameters = {id(one) for one in module.parameters()}
        self._weights: list[tuple[Tensor, Tensor, Tensor]] = []
        with contextlib.suppress(torch.OutOfMemoryError):  # few forwards write to weights
            self._weights = [(one, one.data, one.detach().clone()) for one in module.parameters() if not is_lazy(one)]
        self._versions += [(one, one._version) for one, *_ in self._weights if not one.is_inference()]
        self._keep(module, "self")
        for tensor in itertools.chain(module.parameters(), buffers):
            self._put_back.append(_tensor_attributes_restorer(tensor))
            for name, one in vars(tensor).items():
                if not name.startswith(_OF_DYNAMO):
                    self._keep(one, f"a tensor's {name}")
        scripts = [one for one in modules if isinstance(one, torch.jit.ScriptModule)]  # tensors lie in C++
        self._keep([buffer for script in scripts for buffer in script.buffers(recurse=False)], "TorchScript")
        hooked = [getattr(part, name) for part in modules for name in _HOOKS]
        hooked += [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]  # of every module there is
        hooks = {id(hook): hook for one in hooked for hook in one.values()}
        self._keep(list(hooks.values()), "a hook")
        for owner, name, value in itertools.chain.from_iterable(map(_outside_of, {type(m) for m in modules})):
            if (held := self._keep_bound(owner, name, value)) is not None:
                watched = len(self._watched)
                self._keep(*held)
                if _is_users(value):  # put back, but no part of what is compared: a clock is none of the region's
                    del self._watched[watched:]
        self._of_arguments = True
        self._keep([one for hook in hooks.values() for one in _used_by(hook)], "what a hook writes to")
        known = set(self._found)
        self._keep(arguments, "an argument")
        self._holders = [one for key, one in self._found.items() if key not in known and _holds_tensors(one)]
        self._of_arguments = False
        for value, names, find in changed or []:
            if find is not None:
                with contextlib.suppress(KeyError, AttributeError):  # the name is gone
                    value = find()
            self._keep_named(value, names)
        self._changed = [] if changed is None else changed
        self.random = random_state()
        self.began = self.left()

    _of_arguments = False

    @torch.no_grad()
    def restore(self, *, weights: bool = True) -> None:
        """Put everything back, ``weights`` too; can be done any number of times."""
        for parameter, data, kept in self._weights if weights else ():
            if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                parameter.data = data
            parameter.data.copy_(kept)
        for put_back in self._put_back:
            put_back()
        for tensor, kept in self._tensors.values():
            if tensor.shape == kept.shape:
                tensor.data.copy_(kept)
            else:  # resized by the forward, as an observer of torch.ao.quantization resizes its buffers
                tensor.data = kept.clone()
        tensors, versions = zip(*self._versions, strict=True) if self._versions else ((), ())
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)
        set_random_state(self.random)

    def put_copies(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Let objects among the arguments hold what ``copy`` makes of their tensors, until they are put back."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) or id(tensor) in self._too_large else copy(tensor)

        for holder in self._holders:
            held: list[tuple[Callable[..., Any], Any, Any]]
            held = [(_set_attribute, *one) for one in _attributes(holder).items()]
            held += [(dict.__setitem__, *one) for one in dict.items(holder)] if isinstance(holder, dict) else []
            for put, name, one in held:
                if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(one)):
                    put(holder, name, pytree.tree_map_only(Tensor, copied, one))

    def remember(self, value: Any, names: Iterable[str], find: Callable[[], Any] | None = None) -> bool:
        """Put ``value`` back as well, of which nothing has changed yet: those of its attributes that are named, where
        there are any. Returns whether that can be; None stands for the globals of the user's functions. ``find``
        returns what has taken its place by a later call."""
        names = list(names)
        key = 0 if value is None else id(value)
        if key in self._restored or key in self._tensors or (names and all((key, one) in self._bound for one in names)):
            return True
        if value is None:
            return False
        self._changed.append((value, names, find))
        return self._keep_named(value, names)

    def _keep_named(self, value: Any, names: list[str]) -> bool:
        if isinstance(value, types.ModuleType | type | types.CellType):
            for name in names:
                self._put_back.append(_name_restorer(value, name))
            return bool(names)
        watched, may_change = len(self._watched), len(self.may_change)
        self._keep(value, "", however_large=True)
        del self._watched[watched:], self.may_change[may_change:]  # the compiler says what else changes
        if id(value) not in self._restored and names and not isinstance(value, _CLOSED):
            self._put_back.append(_attributes_restorer(value, _attributes(value)))  # an object of a library
            self._restored.add(id(value))
        return id(value) in self._restored or id(value) in self._tensors

    def left(self) -> dict[str, Any]:
        """What a run has left behind in attributes and containers, as far as it is cheap to compare."""
        found: dict[str, Any] = {}
        for number, (value, name) in enumerate(self._watched):
            if isinstance(value, dict | list | deque | set):
                found[f"{number}: entries of {name}"] = len(value)
                found |= {f"{number}: {name}[{place}]": one for place, one in _few_entries(value)}
            else:
                plain = (bool, int, float, str)
                attributes = _attributes(value).items()
                found |= {f"{number}: {name}.{key}": one for key, one in attributes if isinstance(one, plain)}
        return found

    def _keep_bound(self, owner: Any, name: str, value: Any) -> Held | None:
        """Remember what ``name`` of ``owner`` is bound to; returns what else is to be kept of it."""
        if isinstance(value, int | float | str | types.NoneType):
            self._put_back.append(partial(_bind, owner, name, value))
        elif not isinstance(value, (*_CONTAINERS, *_BYTES, *_CLOSED, Tensor)) and not _is_users(value):
            return None
        self._bound.add((0 if isinstance(owner, dict) else id(owner), name))
        return (value, name) if _deep(value) else None

    def _keep(self, value: Any, name: str, *, however_large: bool = False) -> None:
        """Remember the contents of ``value``, which ``name`` calls, and of all that is inside it. ``however_large``:
        ``value`` itself is copied in any case."""
        waiting = deque([(value, name)] if _deep(value) else [])
        while waiting:  # so that a container comes back before what is put into it
            value, name = waiting.popleft()
            if isinstance(value, Tensor):
                # Parameters are not written to in a forward.
                if id(value) in self._parameters or id(value) in self._given or value.requires_grad:
                    continue
                if is_lazy(value):
                    self.cannot_restore.append(f"{name}, a buffer without a shape")
                elif id(value) not in self._tensors and (
                    id(value) in self._buffers or however_large or self._takes(value, name)
                ):
                    self._tensors[id(value)] = value, value.detach().clone()
                    if not value.is_inference():
                        self._versions.append((value, value._version))
            elif _is_iterator(value):
                self.cannot_restore.append(f"{name} ({type(value).__name__})")
            elif isinstance(value, _CLOSED):
                self.may_change.append(f"{name} ({type(value).__name__})")
            elif id(value) not in self._found and (however_large or self._takes(value, name)):
                self._found[id(value)] = value
                put_back, inside = _opened(value, name, of_arguments=self._of_arguments)
                if isinstance(value, types.FunctionType) and not _is_library(value.__module__):
                    for function in _called_by([value]):
                        owned = itertools.starmap(self._keep_bound, _bound_by(function))
                        inside = itertools.chain(inside, [held for held in owned if held is not None])
                if put_back is not None:
                    self._put_back.append(put_back)
                    self._restored.add(id(value))
                    if _is_compared(value, of_arguments=self._of_arguments):
                        self._watched.append((value, name))
                waiting.extend(itertools.islice(inside, max(self._objects_left, 0) + 1))
            however_large = False

    def _takes(self, value: Any, name: str) -> bool:
        """Whether ``value`` is within the bounds; else it is noted."""
        size = _size(value)
        if self._objects_left > 0 and size <= self._bytes_left:
            self._objects_left -= 1
            self._bytes_left -= size
            return True
        if size > self._bytes_left:
            if id(value) not in self._too_large:
                self._too_large[id(value)] = value
                self._note_large(value, name, size)
        elif self._objects_left == 0:  # once
            self._objects_left = -1
            self.may_change.append(f"{name} (one of more than {MOST_OBJECTS:,} objects)")
        return False

    def _note_large(self, value: Any, name: str, size: int) -> None:
        if not isinstance(value, Tensor | numpy.ndarray):
            what = f"{size // _OF_AN_ENTRY:,} entries" if isinstance(value, _COUNTED) else _shown(size)
            self.may_change.append(f"{name} ({type(value).__name__}, {what})")
        elif (large := _large(name, value)) is not None:
            self.large.append(large)
        else:
            self.cannot_restore.append(f"{name} ({type(value).__name__}, {_shown(size)}), too large to be copied")


# ---- how large things are --------------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    """Bytes that a copy of ``value`` takes, without what it refers to."""
    if isinstance(value, _COUNTED):
        kind: Any = next(kind for kind in _COUNTED if isinstance(value, kind))
        return _OF_AN_ENTRY * int(kind.__len__(value))  # not by a method that a subclass may have replaced
    if isinstance(value, numpy.ndarray):
        return value.nbytes if _may_be_written(value) else 0
    if isinstance(value, Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, memoryview):
        return value.nbytes
    if isinstance(value, bytearray | array.array):
        return len(value) * getattr(value, "itemsize", 1)
    if isinstance(value, io.StringIO | io.BytesIO) and not value.closed:
        place = value.tell()
        end = value.seek(0, io.SEEK_END)
        value.seek(place)
        return end
    return 0


def _may_be_written(value: numpy.ndarray[Any, Any]) -> bool:
    """Whether it is no read-only array, nor a part of a file, which is never copied."""
    base: Any = value
    while isinstance(base, numpy.ndarray):
        if isinstance(base, numpy.memmap):
            return False
        base = base.base
    return value.flags.writeable and not isinstance(base, mmap.mmap)


@torch.no_grad()
def _large(name: str, value: Tensor | numpy.ndarray[Any, Any]) -> Large | None:
    """What ``value`` holds now, without a copy of it; None where its bytes cannot be read in one piece."""
    if isinstance(value, numpy.ndarray):
        owner = value
        while isinstance(owner.base, numpy.ndarray):
            owner = owner.base
        if owner.dtype.hasobject or not owner.flags.forc:
            return None
        flat = torch.from_numpy(owner.reshape(-1, order="A").view(numpy.uint8))
    elif type(value) in (Tensor, nn.Buffer) and value.layout is torch.strided:
        flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
    else:
        return None
    whole = len(flat) // (8 * _ROW) * 8 * _ROW
    rows = flat[:whole].view(torch.int64).view(-1, _ROW)
    weights = torch.arange(1, 2 * _ROW, 2, device=flat.device)  # what only changes places shows as well
    if flat.device.type == "cpu":
        sums = rows.mv(weights)
    else:  # which multiply no matrices of integers
        sums = torch.cat([(one * weights).sum(1) for one in rows.split(_AT_ONCE)])
    return Large(name, value, sums, flat[whole:].cpu().numpy().tobytes())


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# ---- what objects hold, and how each kind of them is put back --------------------------------------------------------


def _opened(value: Any, name: str, *, of_arguments: bool) -> tuple[PutBack | None, Iterable[Held]]:
    """What puts the object itself back to what it is now, if it can change, and what it holds, which is put back on its
    own."""
    put_back: PutBack | None
    if isinstance(value, nn.Module):
        own = {attribute: one for attribute, one in vars(value).items() if attribute not in _SKIPPED}
        return _attributes_restorer(value, own), _items(own, name)
    if isinstance(value, _NOT_LOOKED_INTO) or type(value).__module__.startswith(_FRAMEWORKS):
        return None, []
    if isinstance(value, dict | list | deque | set):
        held = (
            _items(value, name) if isinstance(value, dict) else ((one, name) for one in _entries(value) if _deep(one))
        )
        if (attributes := _attributes(value)) or hasattr(value, "__dict__"):  # of a class of its own
            both = (_entries_restorer(value), _attributes_restorer(value, attributes))
            return lambda: [one() for one in both], itertools.chain(held, _items(attributes, name))
        return _entries_restorer(value), held
    if isinstance(value, tuple):
        return None, ((one, name) for one in _entries(value) if _deep(one))
    if isinstance(value, contextvars.ContextVar):
        try:
            held = value.get()
        except LookupError:
            return None, []
        return (lambda: None if value.get() is held else value.set(held)), [(held, name)] if _deep(held) else []
    if isinstance(value, _BYTES):
        return _bytes_restorer(value), []
    if isinstance(value, type(os.environ)):
        environment = dict(value)
        return partial(_put_back_environment, value, environment), []
    if isinstance(value, numpy.ndarray):
        return (partial(numpy.copyto, value, value.copy()) if _may_be_written(value) else None), []
    if isinstance(value, partial | types.MethodType | types.FunctionType):
        return None, [(one, name) for one in _bound(value) if _deep(one)]
    attributes = _attributes(value)
    inside: Iterable[Held] = _items(attributes, name)
    if isinstance(value, _RANDOM):
        put_back = _generator_restorer(value)
    elif _is_open(value, of_arguments=of_arguments):
        put_back = _attributes_restorer(value, attributes)
    else:  # an object of a library: what it holds itself, and of that arrays, tensors and generators
        put_back = None if _is_of_threads(attributes) else _attributes_restorer(value, attributes)
        inside = [one for one in inside if isinstance(one[0], (Tensor, numpy.ndarray, *_RANDOM))]
    return put_back, inside


def _is_of_threads(attributes: dict[str, Any]) -> bool:
    """Whether an object with these attributes may be changed by another thread meanwhile."""
    return any(isinstance(one, (*_OF_THREADS, *_CLOSED)) for one in attributes.values())


def _is_compared(value: Any, *, of_arguments: bool) -> bool:
    """Whether what a run leaves in ``value`` is a part of what the run did: a library's objects may hold clocks."""
    if isinstance(value, (numpy.ndarray, contextvars.ContextVar, *_RANDOM)):
        return False
    kinds = (*_CONTAINERS, *_BYTES, nn.Module)
    return isinstance(value, kinds) or _is_open(value, of_arguments=of_arguments)


def _holds_tensors(value: Any) -> bool:
    """Whether it is an object that a call is given, or a dictionary of a class of its own, and not looked into as
    other dictionaries are."""
    if isinstance(value, dict):
        return bool(pytree.tree_is_leaf(value))
    closed = (*_CONTAINERS, *_BYTES, *_NOT_LOOKED_INTO, tuple, nn.Module, contextvars.ContextVar)
    functions = (partial, types.MethodType, types.FunctionType)
    foreign = type(value).__module__.startswith(_FRAMEWORKS)
    return not isinstance(value, (*closed, *functions)) and not foreign and _is_open(value, of_arguments=True)


def _is_open(value: Any, *, of_arguments: bool) -> bool:
    """Whether an object is put back with all that it holds: one of the user's, or one that a call is given."""
    own = _is_users(value) or isinstance(value, (ChainMap, UserDict, UserList, BaseException))
    return own or (of_arguments and not type(value).__module__.startswith("torch."))


def _entries(container: Any) -> tuple[Any, ...]:
    """What a list, a deque, a set or a tuple holds, not by an iterator of a subclass: that may have no end."""
    kind = next((kind for kind in (list, deque, set, tuple) if isinstance(container, kind)), None)
    return tuple(container if kind is None else kind.__iter__(container))


def _items(items: dict[Any, Any], name: str) -> Iterator[Held]:
    name = name.removesuffix("._modules")
    for key, one in dict.items(items):  # a subclass may load what it holds
        if _deep(one):  # a tensor as a key would be fetched and printed
            yield one, f"{name}.{key}" if isinstance(key, str | int) else name


def _outside_of(cls: type) -> Iterator[tuple[Any, str, Any]]:
    """What methods of a user's class may bind anew outside of a module, or change: ``(owner, name, value)``."""
    yield from _bound_by_class(cls)
    methods = [one for base in cls.__mro__ if not _is_library(base.__module__) for one in vars(base).values()]
    for function in _called_by([one.fget if isinstance(one, property) else one for one in methods]):
        yield from _bound_by(function)


def _bound_by_class(cls: type) -> Iterator[tuple[Any, str, Any]]:
    """What a user's class, its bases and its metaclass hold."""
    for base in (*inspect.getmro(cls), *inspect.getmro(type(cls))):
        if not _is_library(base.__module__):
            yield from ((base, name, value) for name, value in vars(base).items() if not name.startswith("__"))


def _bound_by(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """What a user's function may bind anew, or change: ``(owner, name, value)``. Owners are the dictionary of globals,
    classes and modules of the user's that it names, and the cells of its closure."""
    known = function.__globals__
    named = {name: known[name] for name in function.__code__.co_names if name in known}
    imported = {name: sys.modules[name] for name in function.__code__.co_names if name in sys.modules}
    yield from ((known, name, value) for name, value in named.items() if not name.startswith("__"))
    for one in (*named.values(), *imported.values()):
        if isinstance(one, type):
            yield from _bound_by_class(one)
        elif isinstance(one, types.ModuleType):
            found = {name: vars(one)[name] for name in function.__code__.co_names if name in vars(one)}
            own = not _is_library(one.__name__)
            yield from ((vars(one), name, value) for name, value in found.items() if own or value is os.environ)
    yield from ((vars(function), name, value) for name, value in vars(function).items())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell, "cell_contents", cell.cell_contents
            if isinstance(cell.cell_contents, type):
                yield from _bound_by_class(cell.cell_contents)


def _used_by(hook: Any) -> Iterator[Any]:
    """What a hook, a library's too, may write to: what it is bound to, its closure, and objects among the globals that
    it names."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _used_by(hook.func)
    elif isinstance(hook, types.MethodType):
        yield from _used_by(hook.__func__)
        if not isinstance(hook.__self__, nn.Module):
            yield hook.__self__
    elif isinstance(hook, types.FunctionType) and not hook.__module__.startswith("torch."):
        for cell in hook.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents
        named = [hook.__globals__.get(name) for name in hook.__code__.co_names]
        yield from (one for one in named if not callable(one))


def _deep(value: Any) -> bool:
    return not isinstance(value, _PLAIN)


def _bind(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if owner.get(name, _bind) is not value:
            owner[name] = value
    elif getattr(owner, name, _bind) is not value:
        setattr(owner, name, value)


def _called_by(callables: Iterable[Any]) -> list[types.FunctionType]:
    """``callables`` that are the user's functions, or methods, and his functions that they call by name, however
    deep."""
    waiting = [getattr(one, "__func__", one) for one in callables]
    found: dict[int, types.FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.FunctionType) and not _is_library(function.__module__):
            if id(function) not in found:
                waiting += [function.__globals__.get(name) for name in function.__code__.co_names]
                waiting += [one for one in _bound(function) if isinstance(one, types.FunctionType)]
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


def _few_entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Of a container with few entries, those that are exact, by place; the keys too, where their order is its own. Not
    by methods that a subclass may have replaced."""
    kind: Any = next((one for one in (dict, list, deque) if isinstance(value, one)), None)
    if kind is None or kind.__len__(value) > FEW:
        return
    exact = bool, int, str
    items = dict.items(value) if kind is dict else enumerate(kind.__iter__(value))
    yield from ((place, one) for place, one in items if isinstance(one, exact) and isinstance(place, exact))
    if isinstance(value, OrderedDict):
        keys = enumerate(OrderedDict.__iter__(value))
        yield from ((f"key {place}", one) for place, one in keys if isinstance(one, exact))


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds that a forward returns; nothing, where it holds more than results."""
    closed = isinstance(value, (*_PLAIN, *_NOT_LOOKED_INTO, nn.Module))
    return {} if closed or type(value).__module__.startswith(_FRAMEWORKS) else _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    slots: Iterable[str] = itertools.chain.from_iterable(
        (own,) if isinstance(own := vars(base).get("__slots__", ()), str) else own for base in type(value).__mro__
    )
    found = {slot: getattr(value, slot) for slot in slots if not slot.startswith("__") and hasattr(value, slot)}
    return {**found, **getattr(value, "__dict__", {})}


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    """Not by methods that a class may have replaced."""
    if name in getattr(holder, "__dict__", ()):
        vars(holder)[name] = value
    else:
        object.__setattr__(holder, name, value)


def _name_restorer(owner: Any, name: str) -> PutBack:
    """Binds ``name`` to what it is bound to now, or to nothing."""
    found = None if isinstance(owner, types.CellType) else vars(owner).get(name, _name_restorer)

    def put_back() -> None:
        now = vars(owner).get(name, _name_restorer)
        if found is _name_restorer and now is not found:
            delattr(owner, name)
        elif now is not found:
            setattr(owner, name, found)

    if isinstance(owner, types.CellType):
        return partial(_bind, owner, name, owner.cell_contents)
    return put_back


def _attributes_restorer(value: Any, before: dict[str, Any]) -> PutBack:
    skipped: set[str] = _SKIPPED if isinstance(value, nn.Module) else set()
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


def entries_of(container: Any) -> Any:
    """What a container holds, to compare and to put back later."""
    if isinstance(container, dict):  # not by methods that a subclass may have replaced
        kind = OrderedDict if isinstance(container, OrderedDict) else dict  # whose order is its own
        return (*kind.keys(container), *kind.values(container))
    if isinstance(container, Mapping):
        return (*container.keys(), *container.values())
    return frozenset(_entries(container)) if isinstance(container, set) else _entries(container)


def _tensor_attributes_restorer(tensor: Tensor) -> PutBack:
    """Attributes that a tensor was given, but for the compiler's."""
    before = dict(vars(tensor))

    def put_back() -> None:
        now = vars(tensor)
        for name in [one for one in now if one not in before and not one.startswith(_OF_DYNAMO)]:
            del now[name]
        for name, kept in before.items():
            if now.get(name, _deep) is not kept and not name.startswith(_OF_DYNAMO):
                now[name] = kept

    return put_back


def _entries_restorer(value: Any) -> PutBack:
    before = entries_of(value)

    def put_back() -> None:
        # Left alone where nothing changed: compiled code may have looked at its version.
        now = entries_of(value)
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return
        if isinstance(value, dict):
            half = len(before) // 2
            plain = OrderedDict if isinstance(value, OrderedDict) else dict  # a Counter's update counts
            plain.clear(value)
            for key, one in zip(before[:half], before[half:], strict=True):
                plain.__setitem__(value, key, one)
        else:
            kind: Any = next(kind for kind in (list, deque, set) if isinstance(value, kind))
            kind.clear(value)
            (set.update if kind is set else kind.extend)(value, before)

    return put_back


def _bytes_restorer(value: Any) -> PutBack:
    if isinstance(value, io.StringIO | io.BytesIO):
        if value.closed:
            return lambda: None
        file: Any = value
        written, place = file.getvalue(), file.tell()

        def put_back() -> None:
            if file.getvalue() != written:
                file.seek(0)
                file.truncate()
                file.write(written)
            file.seek(place)

        return put_back
    if isinstance(value, memoryview):
        if value.readonly or not value.c_contiguous:
            return lambda: None
        flat = value.cast("B")
        return partial(flat.__setitem__, slice(None), bytes(flat))
    return partial(value.__setitem__, slice(None), value[:])


def _put_back_environment(environ: Any, before: dict[str, str]) -> None:
    if dict(environ) != before:
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update(before)


def _generator_restorer(value: Any) -> PutBack:
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", copy.deepcopy(value.state))
    return partial(value.set_state, value.get_state())


# ---- random numbers --------------------------------------------------------------------------------------------------


def random_state() -> tuple[Any, ...]:
    """State of Python's, NumPy's and torch's random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), copy.deepcopy(numpy.random.get_state()), torch.get_rng_state(), cuda


def drew_random_numbers(before: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a generator of torch's, and whether Python's or numpy's, has moved between two ``random_state()``."""
    python, array, host, cuda = before
    moved = now[0] != python or now[1][2] != array[2] or not numpy.array_equal(now[1][1], array[1])
    torchs = zip([host, *cuda], [now[2], *now[3]], strict=True)
    return not all(torch.equal(one, other) for one, other in torchs), moved


def seed_all(seed: int, host_seed: int) -> None:
    """Of torch's generators, and of Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(host_seed)
    numpy.random.seed(host_seed)


def set_random_state(state: tuple[Any, ...]) -> None:
    python, array, host, cuda = state
    random.setstate(python)
    numpy.random.set_state(array)
    torch.set_rng_state(host)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
