"""Host recorder: records every Python value that a real step reads while it runs, and leaves the step alone.

Reads of attributes are seen by a ``__getattribute__`` that classes have while the recorder is on; reads of globals
and calls into C by ``sys.setprofile``. What is read is followed: containers into their entries, functions into their
closures and defaults. What the step changes on the host is a problem, and so is what nothing could compare later (a
clock, an iterator): a graph of that step could not stand for it. All of it stays as the step has left it.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import decimal
import dis
import enum
import functools
import gc
import importlib.util
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
from torch import Tensor, nn

from strategies.compile_errors import TORCH_AND_LIGHTNING, is_ours, origin_of, users_line
from strategies.cuda_graph.batch_index import IndexWatch
from strategies.cuda_graph.host_state import CONTAINERS, GONE, PLAIN, HostState, Value, named
from strategies.region_state import entries_of
from strategies.torch_patches import reset_fsdp_state

_PURE = """builtins math cmath _operator itertools _functools functools _collections collections _abc _bisect _heapq
_struct _sre re _string _warnings _thread _weakref _typing typing _json _csv array _copy copyreg _contextvars _ast _stat
_statistics _decimal sys gc _queue _imp _codecs _locale _weakrefset inspect random _random unicodedata"""
PURE_STDLIB = frozenset(_PURE.split())
"""Modules whose C functions bring nothing from outside; the global generators are compared by state."""
LOGS = ("log", "log_dict")
IGNORED = (*LOGS, "_current_fx_name")
"""Attributes of which a step makes no other use than to log: a replay logs what was recorded. The last one is
Lightning's name of the hook under way."""
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


class HostRecorder:
    """Records one step. A value that is reached is kept once, with the name by which a reader would find it.

    Args:
        device: Where the step computes; tensors that lie elsewhere are compared by their numbers.
        problem_types: Types that must not be read, with the reason.
    """

    def __init__(self, device: torch.device, problem_types: Mapping[type, str]) -> None:
        self._device, self._problem_types = device, problem_types
        self.problems: dict[str, None] = {}
        """Why no graph can stand for the step, each reason once."""
        self._contents: dict[int, tuple[Any, str, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._versions: dict[int, int] = {}
        self._values: dict[tuple[int, str], Value] = {}
        self._labels: dict[int, str] = {}
        self._kept: list[Any] = []
        self._methods: dict[types.CodeType, types.FunctionType] = {}
        """Of classes that were reached; what they lead to counts once they are called."""
        self._codes: set[types.CodeType] = set()
        self._found_on_class: Any = functools.cache(found_on_class)
        self._written: set[tuple[int, str]] = set()
        self._shards: dict[tuple[int, str], Any] = {}
        """Sharded parameters, whose place is taken by what was gathered for the length of a forward."""
        self._index: IndexWatch | None = None
        self._entry: types.CodeType | None = None
        self._outermost = 0
        """Identity of the outermost frame of the user's that is under way: what the loop reads around it is its own."""
        self._thread = threading.get_ident()
        self._busy = 0
        self._undo = contextlib.ExitStack()
        self._patched: set[type] = set()

    @contextlib.contextmanager
    def recording(
        self,
        module: nn.Module,
        index: IndexWatch | None = None,
        step: Callable[..., Any] | None = None,
        *,
        entry: types.CodeType | None = None,
        name: str = "self.",
    ) -> Iterator[None]:
        """Record what the block reads of ``module`` and its submodules, of what ``step`` holds, of globals, and of
        whatever these lead to; tell ``index`` of the calls in it.

        ``entry``: code from whose call on reads count; None = the module's ``training_step``, or any code of the
        user's. ``name``: the module's own in messages."""
        before = random_states(self._device)
        self._index = index
        self._entry = entry or getattr(getattr(type(module), "training_step", None), "__code__", None)
        with self._undo:
            for path, submodule in module.named_modules():
                self._label(submodule, f"{name}{path}." if path else name)
                parameters = submodule._parameters
                self._shards |= {(id(parameters), name): p for name, p in parameters.items() if hasattr(p, "to_local")}
            self._patch(nn.Module)
            for cls in {type(submodule) for submodule in module.modules()}:
                self._reach_class(cls)
            if step is not None:
                self._reach(step, "loss")
            profile = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                with contextlib.nullcontext() if index is None else index.tracing():
                    yield
            finally:
                sys.setprofile(profile)
                reset_fsdp_state(module)
        for change in self.state().changes():
            self._problem(f"changes {change.what}, which a replay would not")
        if before != random_states(self._device):
            self._problem("draws random numbers on the host, which a replay would not: draw them on the device")

    def state(self) -> HostState:
        """What was read, to be compared before each replay."""
        return HostState([*self._values.values()], [*self._contents.values()], [*self._tensors.values()])

    def changed(self) -> tuple[tuple[str, Tensor], ...]:
        """Tensors of the device that were read and have been written to since, with their names."""
        return tuple(
            (label, tensor)
            for tensor, label in self._tensors.values()
            if tensor.device.type == self._device.type
            and not tensor.is_inference()
            and tensor._version != self._versions[id(tensor)]
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    @contextlib.contextmanager
    def logs_unrecorded(self, module: nn.Module, noted: Callable[[], Any] = lambda: None) -> Iterator[None]:
        """Inside, each LightningModule in ``module`` logs as ever, and what that reads is not the step's; ``noted`` is
        called each time."""
        logging = [one for one in module.modules() if hasattr(type(one), "log_dict") and hasattr(one, "training_step")]

        def unrecorded(log: Callable[..., Any]) -> Callable[..., Any]:
            def logs(*arguments: Any, **named: Any) -> Any:
                noted()
                with self.paused():
                    return log(*arguments, **named)

            return logs

        before = [(one, {name: vars(one)[name] for name in LOGS if name in vars(one)}) for one in logging]
        for one in logging:
            vars(one).update({name: unrecorded(getattr(one, name)) for name in LOGS})
        try:
            yield
        finally:
            for one, own in before:
                for name in LOGS:
                    del vars(one)[name]
                vars(one).update(own)

    # ---- what the step reads, calls and writes -----------------------------------------------------------------------

    def _patch(self, cls: type) -> None:
        """Let ``cls`` report reads and writes of its objects' attributes until recording ends."""
        if any(base in self._patched for base in cls.__mro__):
            return

        def reading(function: Any, read: Callable[[Any, str, Any], Any]) -> Any:
            def reported(obj: Any, name: str) -> Any:
                if self._busy or not self._outermost or threading.get_ident() != self._thread:
                    return function(obj, name)
                return read(obj, name, function)

            return reported

        def writing(function: Any) -> Any:
            def reported(obj: Any, name: str, *value: Any) -> None:
                with self._writing(obj, name):
                    function(obj, name, *value)

            return reported

        replaced: dict[str, Any] = {
            "__getattribute__": reading(cls.__getattribute__, self._read),
            **{name: writing(getattr(cls, name)) for name in ("__setattr__", "__delattr__")},
        }
        if cls is nn.Module:
            replaced["__getattr__"] = reading(cls.__getattr__, self._read_of_module)
        try:
            for name, function in replaced.items():
                self._undo.enter_context(mock.patch.object(cls, name, function))
        except TypeError:  # a class of C, whose attributes are methods
            return
        self._patched.add(cls)

    def _read(self, obj: Any, name: str, getter: Any) -> Any:
        label = self._labels.get(id(obj))
        if label is None or name in IGNORED or (name.startswith("__") and name != "__dict__"):
            return getter(obj, name)
        owner, static = self._found_on_class(type(obj), name)
        descriptor = hasattr(type(static), "__set__")
        of_lightning = top_of(type(obj)) in LIGHTNING or (
            descriptor and owner is not None and top_of(owner) in LIGHTNING  # self.global_step, self.trainer
        )
        try:
            with self.paused() if of_lightning else contextlib.nullcontext():
                value = getter(obj, name)
        except AttributeError:
            with self.paused():
                if isinstance(static, types.MemberDescriptorType):  # a slot, which lies in no dictionary
                    self._remember(obj, name, label)
                else:
                    self._expect(attributes_of(obj), name, GONE, label, obj)
            raise
        with self.paused():
            full = f"{label}{name}"
            if name == "__dict__":
                self._read_all(obj, value)
            elif of_lightning or isinstance(static, types.MemberDescriptorType):
                if not isinstance(value, types.MethodType):
                    key = (id(obj), name)
                    if key not in self._values:
                        self._values[key] = Value(full, functools.partial(getattr, obj, name), value, users_line())
                    self._reach(value, full)
            elif not descriptor:
                attributes = attributes_of(obj)
                self._expect(attributes, name, attributes.get(name, GONE), label, obj)
                if name not in attributes and owner is not None and not self._is_library(owner):
                    self._expect(vars(owner), name, static, f"{owner.__qualname__}.", owner)
                self._reach(value, full)
        return value

    def _read_all(self, obj: Any, attributes: dict[str, Any]) -> None:
        label = self._labels[id(obj)]

        def present() -> list[str]:
            return [name for name in attributes if name not in IGNORED]

        for name in present():
            self._expect(attributes, name, attributes[name], label, obj)
            self._reach(attributes[name], f"{label}{name}")
        self._values.setdefault((id(obj), "__dict__"), Value(f"vars({label[:-1]})", present, present()))

    def _read_of_module(self, obj: nn.Module, name: str, fallback: Any) -> Any:
        with self.paused():
            label = self._labels.get(id(obj))
            if label is None:
                return fallback(obj, name)
            attributes = object.__getattribute__(obj, "__dict__")
            for kind in ("_parameters", "_buffers", "_modules"):
                mapping = attributes[kind]
                if name not in mapping:
                    self._expect(mapping, name, GONE, label, mapping)
                elif (id(obj), name) not in self._written:
                    value = self._shards.get((id(mapping), name), mapping[name])
                    self._expect(mapping, name, value, label, mapping)
                    self._reach(value, f"{label}{name}")
            return fallback(obj, name)

    @contextlib.contextmanager
    def _writing(self, obj: Any, name: str) -> Iterator[None]:
        """Remember what was there before the first write; what is read afterwards is the call's own."""
        label = None if name in IGNORED or threading.get_ident() != self._thread else self._labels.get(id(obj))
        if not self._busy and self._outermost and label is not None:
            with self.paused():
                self._written.add((id(obj), name))
                self._remember(obj, name, label)
        with self.paused():
            yield

    def _remember(self, obj: Any, name: str, label: str) -> None:
        read = functools.partial(getattr, obj, name, GONE)
        self._values.setdefault((id(obj), name), Value(f"{label}{name}", read, read(), users_line()))

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        if self._busy:
            return
        code = frame.f_code
        if event == "c_call":
            if self._outermost:
                self._called(frame, called)
        elif event == "return":
            if self._index is not None:
                self._index.returned(frame)
            if id(frame) == self._outermost:
                self._outermost = 0
        elif event == "call":
            if self._index is not None:
                self._index.called(frame)
            if not self._outermost and (code is self._entry or origin_of(code.co_filename) == "other"):
                self._outermost = id(frame)
            if self._outermost:
                self._entered(frame, code)

    def _entered(self, frame: types.FrameType, code: types.CodeType) -> None:
        """Code of the user's names globals that it may read."""
        if code not in self._codes:
            self._codes.add(code)
            if origin_of(code.co_filename) != "other":
                return
            with self.paused():
                place, names = f"{Path(code.co_filename).name}:{code.co_firstlineno}", frame.f_globals
                for name in code.co_names:
                    if name in names and (id(names), name) not in self._values:
                        self._values[id(names), name] = named(names, name, names[name], "global ", place)
                        self._reach(names[name], name)
                for module, imported in imports_of(code, names):
                    self._reach(module, module.__name__)
                    if is_users_module(module):
                        for name in vars(module).keys() & imported:
                            self._expect(vars(module), name, vars(module)[name], f"{module.__name__}.", module)
                            self._reach(vars(module)[name], f"{module.__name__}.{name}")
                if (method := self._methods.get(code)) is not None:
                    self._reach_function(method)

    def _called(self, frame: types.FrameType, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        if isinstance(owner, types.ModuleType) or owner is None:
            source = getattr(called, "__module__", None) or "builtins"
        else:
            source = (owner if isinstance(owner, type) else type(owner)).__module__
        top = source.partition(".")[0]
        if called.__name__ not in ("open", "input") and (top in PURE_STDLIB or top not in sys.stdlib_module_names):
            return
        caller: types.FrameType | None = frame
        while caller is not None and origin_of(caller.f_code.co_filename) == "stdlib":
            if caller.f_globals.get("__name__", "").partition(".")[0] in ("logging", "warnings", "linecache"):
                return
            caller = caller.f_back
        if caller is not None and origin_of(caller.f_code.co_filename) == "other":
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self._problem(f"calls {source}.{called.__name__} ({place}), and a replay would keep what it returned")

    # ---- what a value leads to ---------------------------------------------------------------------------------------

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
        if not is_users_module(module):
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


def found_on_class(cls: type, name: str) -> tuple[type | None, Any]:
    """The class that ``name`` is found on, and what it is there."""
    owner = next((base for base in cls.__mro__ if name in base.__dict__), None)
    return owner, None if owner is None else owner.__dict__[name]


def attributes_of(obj: Any) -> dict[str, Any]:
    """Its own, whatever its class says; empty where it has slots alone."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = {}
    return attributes


def imports_of(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[types.ModuleType, Sequence[str]]]:
    """Modules that ``code``, a function whose globals are ``names``, imports as it runs; what it takes from each."""
    before: list[Any] = []
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level, taken = before[-2:]
            with contextlib.suppress(ImportError):  # from a package above the top
                full = importlib.util.resolve_name("." * level + one.argval, names.get("__package__"))
                if isinstance(module := sys.modules.get(full), types.ModuleType):
                    yield module, taken or ()
        if one.opname != "EXTENDED_ARG":  # of the instruction that follows: code with more than 255 names has them
            before.append(one.argval)


def is_users_module(module: types.ModuleType) -> bool:
    """Whether it is neither a library's nor built in: what it holds may change."""
    file = getattr(module, "__file__", None)
    if file is None:  # a notebook's, or made by hand
        return getattr(module, "__spec__", None) is None
    return origin_of(file) == "other" and "site-packages" not in file


def top_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def random_states(device: torch.device) -> tuple[Any, ...]:
    """Python's and numpy's global generators, and torch's on the host where that is not the device's own."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    states = random.getstate(), kind, numpy.asarray(keys).tobytes(), tuple(rest)
    return states if device.type == "cpu" else (*states, bytes(torch.get_rng_state().numpy()))
