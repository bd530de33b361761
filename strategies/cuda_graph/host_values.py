"""Host values: what a value that a call has read on the host leads to, and how it is compared later.

Containers lead to their entries, functions to their closures and defaults, objects to whatever is read of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import decimal
import enum
import functools
import gc
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from strategies.compile_errors import TORCH_AND_LIGHTNING, is_ours, origin_of, users_line
from strategies.cuda_graph.host_state import CONTAINERS, PLAIN, Value, named
from strategies.region_state import entries_of

MAX_ENTRIES = 100_000
"""Longest container that is compared before every step."""
MAX_BYTES = 1 << 20
"""Largest array on the host that is."""


class _Named(NamedTuple):
    """For the type of a named tuple's fields."""

    place: int


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
CONSTANT = (
    *PLAIN, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size, enum.Enum, PurePath, re.Pattern,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, range, slice, logging.Logger, property,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType,
    types.GenericAlias, types.UnionType, type(Ellipsis), type(NotImplemented), numpy.generic, numpy.dtype,
    type(_Named.place), type(threading.Lock()), type(threading.RLock()), threading.local, staticmethod, classmethod,
    torch.Tag,
)  # fmt: skip
"""Values that no step changes, or on which no kernel depends."""

OBSERVED_OF_TORCH = (
    nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.distributions.Distribution,
    torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler,
)  # fmt: skip
"""Torch's classes whose attributes decide what a step computes, or lead to objects that do."""


class HostValues:
    """Values that were reached, each once, with the names by which a reader would find them.

    Args:
        device: Where the call computes; tensors that lie elsewhere are compared by their numbers.
        problem_types: Types that must not be read, with the reason.
    """

    def __init__(self, device: torch.device, problem_types: Mapping[type, str]) -> None:
        self._device, self._problem_types = device, problem_types
        self._contents: dict[int, tuple[Any, str, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._versions: dict[int, int] = {}
        self._values: dict[tuple[int, str], Value] = {}
        self._labels: dict[int, str] = {}
        self._kept: list[Any] = []
        self._methods: dict[types.CodeType, types.FunctionType] = {}
        """Of classes that were reached; what they lead to counts once they are called."""
        self._busy = 0
        self._undo = contextlib.ExitStack()
        self._patched: set[type] = set()
        self.problems: dict[str, None] = {}
        """Why no graph can stand for the call, each reason once."""

    def _patch(self, cls: type) -> None:
        raise NotImplementedError

    def _reach(self, value: Any, label: str) -> None:
        if isinstance(value, CONSTANT) or id(value) in self._labels:
            return
        for kind, reason in self._problem_types.items():
            if isinstance(value, kind):
                self._problem(f"uses {label}, {reason} ({users_line()})")
                return
        if isinstance(value, Tensor):
            self._label(value, label)
            self._reach_tensor(value, label)
        elif isinstance(value, (*CONTAINERS, types.MappingProxyType)):
            self._reach_container(value, label)
        elif isinstance(value, types.FunctionType):
            self._label(value, label)
            self._reach_function(value)
        elif isinstance(value, types.MethodType):
            self._reach(value.__self__, f"{label}.__self__")
            self._reach(value.__func__, label)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(part, label)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._reach_memo(value, label)
        elif isinstance(value, weakref.ref):
            self._reach(value(), label)
        elif isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState | torch.Generator):
            # One on a device advances within a graph, or its capture fails.
            if not isinstance(value, torch.Generator) or value.device.type == "cpu":
                self._problem(f"draws random numbers on the host from {label}: draw them on the device")
        elif isinstance(value, numpy.ndarray):
            self._label(value, label)
            self._compare_numbers(label, value.nbytes, value.tobytes)
        elif isinstance(value, contextvars.ContextVar):
            self._label(value, label)
            read = functools.partial(value.get, None)
            self._values[id(value), label] = Value(label, read, read(), users_line())
            self._reach(read(), label)
        elif isinstance(value, type):
            self._reach_class(value)
        elif isinstance(value, types.ModuleType):
            self._reach_module(value)
        else:
            self._reach_object(value, label)

    def _reach_tensor(self, tensor: Tensor, label: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded one (DTensor), the own part
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return
        self._tensors[id(tensor)] = (tensor, label)
        self._versions[id(tensor)] = tensor._version if not tensor.is_inference() else 0
        if tensor.device.type not in (self._device.type, "meta"):
            self._compare_numbers(
                label, tensor.nbytes, lambda: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )

    def _compare_numbers(self, label: str, size: int, read: Any) -> None:
        if size > MAX_BYTES:
            self._problem(
                f"reads {label}, {size / 2**20:.0f} MiB on the host: register it as a buffer ({users_line()})"
            )
        else:
            self._values[id(read), label] = Value(f"the numbers in {label}", read, read(), users_line())

    def _reach_container(self, value: Any, label: str) -> None:
        self._label(value, label)
        if len(value) > MAX_ENTRIES:
            self._problem(f"reads {label}, too long to be compared before every step ({len(value):,} entries)")
            return
        if not isinstance(value, tuple | frozenset):
            self._contents[id(value)] = (value, label, entries_of(value))
        if isinstance(value, dict | types.MappingProxyType):
            items = dict.items(value) if isinstance(value, dict) else value.items()
            for key, entry in list(items):
                self._reach(entry, f"{label}[{key!r}]" if isinstance(key, PLAIN) else f"{label}[...]")
        else:
            for place, entry in enumerate(list(value)):
                self._reach(entry, f"{label}[{place}]")
        if hasattr(value, "__dict__") and not self._is_library(type(value)):
            self._reach_object(value, label)

    def _reach_function(self, function: types.FunctionType) -> None:
        torchs_own = origin_of(function.__code__.co_filename) != "other"
        if not torchs_own:
            for default in function.__defaults__ or ():
                self._reach(default, f"a default of {function.__qualname__}")
            for name, default in (function.__kwdefaults__ or {}).items():
                self._reach(default, f"{name} of {function.__qualname__}")
            for name, value in vars(function).items():
                self._expect(vars(function), name, value, f"{function.__qualname__}.", function)
                self._reach(value, f"{function.__qualname__}.{name}")
        code = function.__code__
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # empty so far
                continue
            label = f"{name} in {function.__qualname__}"
            if torchs_own:  # a wrapper, such as that of torch.no_grad(): what it wraps counts
                if isinstance(value, types.FunctionType | types.MethodType):
                    self._reach(value, label)
            elif (id(cell), label) not in self._values:
                read = functools.partial(getattr, cell, "cell_contents")
                self._values[id(cell), label] = Value(label, read, value, where)
                self._kept.append(cell)
                self._reach(value, label)

    def _reach_memo(self, function: functools._lru_cache_wrapper[Any], label: str) -> None:
        """What it has stored is its answer until somebody clears it; what it computes anew is observed as it runs."""
        self._label(function, label)
        self._reach(function.__wrapped__, label)
        # The stored keys and results, where their number is limited; the dictionary of them; the function's own parts.
        parts = gc.get_referents(function)
        place, entries = next(
            (place, part)
            for place, part in reversed([*enumerate(parts)])
            if type(part) is dict and part is not vars(function)
        )
        if len(entries) != function.cache_info().currsize or len(entries) > MAX_ENTRIES:
            self._problem(f"reads {label} ({users_line()}), of {len(entries):,} stored results, too many to compare")
            return
        unlimited = function.cache_parameters()["maxsize"] is None
        for result in [*entries.values()] if unlimited else parts[:place]:
            self._reach(result, f"what {label} has stored")
        self._kept.append([*entries.values()])

        def read() -> list[int]:
            return [*map(id, entries.values())]

        self._values[id(function), label] = Value(f"what {label} has stored", read, read(), users_line())

    def _reach_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not self._is_library(base) and not issubclass(base, enum.Enum) and id(base) not in self._labels:
                self._label(base, f"{base.__qualname__}.")
                for name, value in list(vars(base).items()):
                    if not name.startswith("__"):
                        self._expect(vars(base), name, value, f"{base.__qualname__}.", base)
                        if not isinstance(value, types.FunctionType | type):
                            self._reach(value, f"{base.__qualname__}.{name}")
                    self._register(value)

    def _register(self, method: Any) -> None:
        if isinstance(method, property):
            method = method.fget
        function = getattr(method, "__func__", method)
        while isinstance(function, types.FunctionType) and function.__code__ not in self._methods:
            self._methods[function.__code__] = function
            function = getattr(function, "__wrapped__", None)

    def _reach_module(self, module: types.ModuleType) -> None:
        file = getattr(module, "__file__", None)
        if file is None or origin_of(file) != "other" or "site-packages" in file:
            return
        self._label(module, f"{module.__name__}.")
        if type(module) is types.ModuleType:
            module.__class__ = type("module", (types.ModuleType,), {})
            self._undo.callback(setattr, module, "__class__", types.ModuleType)
            self._patch(type(module))

    def _reach_object(self, value: Any, label: str) -> None:
        cls = type(value)
        self._label(value, f"{label}.")
        if isinstance(value, types.SimpleNamespace):
            self._reach(vars(value), label)
        elif isinstance(value, OBSERVED_OF_TORCH) or not self._is_harmless(cls):
            self._patch(cls)
            if any(base in self._patched for base in cls.__mro__):
                self._reach_class(cls)
            else:
                kind = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
                self._problem(
                    f"reads {label} ({users_line()}), of type {kind}, whose state nothing could compare later"
                )

    def _is_harmless(self, cls: type) -> bool:
        """Whether what objects of ``cls`` hold decides nothing: torch's small types, and ours around regions."""
        if top_of(cls) in ("torch", "numpy", "triton") or cls.__module__ in ("_thread", "types", "typing", "threading"):
            return True
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        return cls.__module__.startswith("_cython") or (file is not None and is_ours(file))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def _label(self, value: Any, label: str) -> None:
        self._labels[id(value)] = label
        self._kept.append(value)  # an id is only its own as long as it lives

    def _expect(self, mapping: Any, name: str, value: Any, label: str, owner: Any) -> None:
        """``name`` is ``value`` in ``mapping``, the names of ``owner``, unless the call has written to it before."""
        key = id(owner), name
        if key not in self._values:
            self._kept.append(owner)
            self._values[key] = named(mapping, name, value, label, users_line())

    def _problem(self, reason: str) -> None:
        self.problems.setdefault(reason)

    def _is_library(self, cls: type) -> bool:
        top = top_of(cls)
        return top in TORCH_AND_LIGHTNING or top in sys.stdlib_module_names


def top_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def random_states(device: torch.device) -> tuple[Any, ...]:
    """Python's and numpy's global generators, and torch's on the host where that is not the device's own."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    states = random.getstate(), kind, numpy.asarray(keys).tobytes(), tuple(rest)
    return states if device.type == "cpu" else (*states, bytes(torch.get_rng_state().numpy()))
