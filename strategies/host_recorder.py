"""Host recorder: records every Python value that a call reads while it runs once.

Reads of attributes are seen by a ``__getattribute__`` that classes have while the recorder is on; reads of globals
and calls into C by ``sys.setprofile``. What is read is followed: containers into their entries, functions into their
closures and defaults. What the call changes on the host, and what it reads that nothing could compare later (a clock,
an iterator), is a problem: a graph of that call could not stand for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import decimal
import enum
import functools
import logging
import pickle
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from strategies.host_state import CONTAINERS, PLAIN, HostState, Names, Value, entries_of, is_unchanged, same

MAX_ENTRIES = 100_000
"""Longest container that is compared before every step."""
MAX_BYTES = 1 << 20
"""Largest array on the host that is."""

TORCH_AND_LIGHTNING = ("torch", "torchvision", "triton", "lightning", "pytorch_lightning", "lightning_fabric", "numpy")
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_PURE = """builtins math cmath _operator itertools _functools functools _collections collections _abc _bisect _heapq
_struct _sre re _string _warnings _thread _weakref _typing typing _json _csv array _copy copyreg _contextvars _ast _stat
_statistics _decimal sys gc _queue _imp _codecs _locale _weakrefset inspect random _random unicodedata"""
PURE_STDLIB = frozenset(_PURE.split())
"""Modules of the standard library whose C functions bring nothing from outside; generators are compared by state."""
CONSTANT = (
    *PLAIN, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size, enum.Enum, PurePath, re.Pattern,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, range, slice, logging.Logger, property,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType,
    types.GenericAlias, types.UnionType, type(Ellipsis), type(NotImplemented), numpy.generic, numpy.dtype,
    type(threading.Lock()), type(threading.RLock()), threading.local, staticmethod, classmethod, torch.Tag,
)  # fmt: skip
"""Values that no step changes, or on which no kernel depends."""

OBSERVED_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Torch's classes whose attributes decide what a step computes."""

_OURS = tuple(f"{Path(__file__).parent.parent / package}/" for package in ("strategies", "trainer"))
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


_GONE = object()


class Unrepeatable(BaseException):
    """A call is about to use up something that cannot be put back. No Exception: the call may catch those."""


class HostRecorder:
    """Records one call.

    Args:
        device: Where it computes; tensors that lie elsewhere are compared by their numbers.
        problem_types: Types that must not be read, with the reason.
        ignored: Attributes that stand in for others while it records.
    """

    def __init__(
        self, device: torch.device, problem_types: dict[type, str] | None = None, ignored: frozenset[str] = frozenset()
    ) -> None:
        self._device, self._problem_types, self._ignored = device, problem_types or {}, ignored
        self._names: dict[int, Names] = {}
        self._contents: dict[int, tuple[Any, str, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._values: dict[tuple[int, str], Value] = {}
        self._generators: dict[int, tuple[str, Any, Any]] = {}
        self._labels: dict[int, str] = {}
        self._kept: list[Any] = []
        self._written: dict[tuple[int, str], tuple[Any, str, str, Any, str]] = {}
        self._codes: set[types.CodeType] = set()
        self._files: dict[str, str] = {}
        self._static: dict[tuple[type, str], tuple[type | None, Any]] = {}
        self._busy = 0
        self._thread = threading.get_ident()
        self._undo = contextlib.ExitStack()
        self._patched: set[type] = set()
        self._problems: dict[str, None] = {}

    @contextlib.contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record what the block reads of ``module`` and its submodules, of globals, and of whatever these lead to."""
        before = _random_states(self._device)
        with self._undo:
            for path, submodule in module.named_modules():
                self._label(submodule, f"self.{path}." if path else "self.")
            self._patch(nn.Module)
            for cls in {type(submodule) for submodule in module.modules()}:
                self._reach_class(cls)
            profile = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                yield
            except Unrepeatable:  # a problem by then
                pass
            finally:
                sys.setprofile(profile)
        self._undo_effects()
        if before != _random_states(self._device):
            self._problem("draws random numbers on the host, which a replay would not: draw them on the device")

    @property
    def problems(self) -> list[str]:
        """Why no graph can stand for the call; empty where one can."""
        return list(self._problems)

    def state(self) -> HostState:
        """What was read, to be compared before each replay."""
        names, values = list(self._names.values()), list(self._values.values())
        return HostState(names, list(self._contents.values()), list(self._tensors.values()), values)

    # ---- reads of attributes -------------------------------------------------------------------------------------

    def _patch(self, cls: type) -> None:
        """Let ``cls`` report reads and writes of its objects' attributes until recording ends."""
        if any(base in self._patched for base in cls.__mro__):
            return
        recorder = self
        getter: Any = cls.__getattribute__
        setter: Any = cls.__setattr__
        deleter: Any = cls.__delattr__

        def __getattribute__(obj: Any, name: str) -> Any:
            if recorder._busy or threading.get_ident() != recorder._thread:
                return getter(obj, name)
            return recorder._read(obj, name, getter)

        def __setattr__(obj: Any, name: str, value: Any) -> None:
            with recorder._writing(obj, name):
                setter(obj, name, value)

        def __delattr__(obj: Any, name: str) -> None:
            with recorder._writing(obj, name):
                deleter(obj, name)

        replaced: dict[str, Any] = {
            "__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__
        }  # fmt: skip
        if cls is nn.Module:
            fallback: Any = cls.__getattr__

            def __getattr__(obj: Any, name: str) -> Any:
                if recorder._busy or threading.get_ident() != recorder._thread:
                    return fallback(obj, name)
                return recorder._read_of_module(obj, name, fallback)

            replaced["__getattr__"] = __getattr__
        own = {name: vars(cls)[name] for name in replaced if name in vars(cls)}
        try:
            for name, function in replaced.items():
                setattr(cls, name, function)
        except TypeError:  # a class of C, whose attributes are methods
            return
        self._patched.add(cls)

        def restore() -> None:
            for name in replaced:
                if name in own:
                    setattr(cls, name, own[name])
                else:
                    delattr(cls, name)

        self._undo.callback(restore)

    def _read(self, obj: Any, name: str, getter: Any) -> Any:
        label = self._labels.get(id(obj))
        if label is None or name in self._ignored or (name.startswith("__") and name != "__dict__"):
            return getter(obj, name)
        owner, static = self._found_on_class(type(obj), name)
        descriptor = hasattr(type(static), "__set__")
        of_lightning = _top(type(obj)) in LIGHTNING or (
            descriptor and owner is not None and _top(owner) in LIGHTNING  # self.global_step, self.trainer
        )
        try:
            if of_lightning:
                with self._quiet():
                    value = getter(obj, name)
            else:
                value = getter(obj, name)
        except AttributeError:
            with self._quiet():
                self._of(obj).absent.add(name)
            raise
        with self._quiet():
            full = f"{label}{name}"
            if name == "__dict__":
                self._read_all(obj, value)
            elif of_lightning or isinstance(static, types.MemberDescriptorType):
                if not isinstance(value, types.MethodType):
                    key = (id(obj), name)
                    if key not in self._written and key not in self._values:
                        self._values[key] = Value(full, functools.partial(getattr, obj, name), value, self._line())
                    self._reach(value, full)
            elif not descriptor:
                self._found(obj, name, value, owner, static)
        return value

    def _found(self, obj: Any, name: str, value: Any, owner: type | None, static: Any) -> None:
        names = self._of(obj)
        if name in names.mapping:
            self._expect(names, name, value, (id(obj), name))
        else:
            names.absent.add(name)
            if owner is not None and not self._is_library(owner):
                of_class = self._names_of(vars(owner), f"{owner.__qualname__}.", owner)
                self._expect(of_class, name, static, (id(owner), name))
        self._reach(value, f"{names.label}{name}")

    def _read_all(self, obj: Any, attributes: dict[str, Any]) -> None:
        names, ignored = self._of(obj), self._ignored
        for name in [name for name in attributes if name not in ignored]:
            self._expect(names, name, attributes[name], (id(obj), name))
            self._reach(attributes[name], f"{names.label}{name}")

        def present() -> list[str]:
            return [name for name in attributes if name not in ignored]

        self._values.setdefault((id(obj), "__dict__"), Value(f"vars({names.label[:-1]})", present, present()))

    def _read_of_module(self, obj: nn.Module, name: str, fallback: Any) -> Any:
        """A parameter, a buffer or a submodule."""
        with self._quiet():
            label = self._labels.get(id(obj))
            if label is None:
                return fallback(obj, name)
            attributes = object.__getattribute__(obj, "__dict__")
            for kind in ("_parameters", "_buffers", "_modules"):
                names = self._names_of(attributes[kind], label, attributes[kind])
                if name in names.mapping:
                    self._expect(names, name, names.mapping[name], (id(obj), name))
                    self._reach(names.mapping[name], f"{label}{name}")
                else:
                    names.absent.add(name)
            return fallback(obj, name)

    def _expect(self, names: Names, name: str, value: Any, key: tuple[int, str]) -> None:
        if name not in names.expected and key not in self._written:
            names.expected[name] = value
            names.where[name] = self._line()

    @contextlib.contextmanager
    def _writing(self, obj: Any, name: str) -> Iterator[None]:
        key = (id(obj), name)
        if not self._busy and key not in self._written and threading.get_ident() == self._thread:
            label = self._labels.get(id(obj))
            if label is not None:
                with self._quiet():
                    self._written[key] = (obj, name, label, getattr(obj, name, _GONE), self._line())
        with self._quiet():
            yield

    # ---- reads of globals, calls into C --------------------------------------------------------------------------

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event not in ("call", "c_call") or self._busy:
            return
        code = frame.f_code
        if event == "c_call":
            self._called(frame, called)
        elif code not in self._codes:
            self._codes.add(code)
            if self._origin(code.co_filename) != "other":
                return
            with self._quiet():
                label = "global "
                names = self._names_of(frame.f_globals, label, frame.f_globals)
                place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                for name in code.co_names:
                    if name in frame.f_globals and name not in names.expected:
                        names.expected[name] = frame.f_globals[name]
                        names.where[name] = place
                        self._reach(frame.f_globals[name], name)

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
        while caller is not None and self._origin(caller.f_code.co_filename) == "stdlib":
            if caller.f_globals.get("__name__", "").partition(".")[0] in ("logging", "warnings", "linecache"):
                return
            caller = caller.f_back
        if caller is not None and self._origin(caller.f_code.co_filename) == "other":
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self._problem(f"calls {source}.{called.__name__} ({place}), and a replay would keep what it returned")

    # ---- what a value leads to -----------------------------------------------------------------------------------

    def _reach(self, value: Any, label: str) -> None:
        if isinstance(value, CONSTANT) or id(value) in self._labels:
            return
        for kind, reason in self._problem_types.items():
            if isinstance(value, kind):
                self._problem(f"uses {label}, {reason} ({self._line()})")
                return
        if isinstance(value, Tensor):
            self._label(value, label)
            self._reach_tensor(value, label)
        elif isinstance(value, (*CONTAINERS, types.MappingProxyType)):
            self._reach_container(value, label)
        elif isinstance(value, types.FunctionType):
            self._label(value, label)
            self._reach_function(value, label)
        elif isinstance(value, types.MethodType):
            self._reach(value.__self__, f"{label}.__self__")
            self._reach(value.__func__, label)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(part, label)
        elif isinstance(value, weakref.ref):
            self._reach(value(), label)
        elif isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState | torch.Generator):
            self._label(value, label)
            self._generators[id(value)] = (label, value, _generator_state(value))
        elif isinstance(value, numpy.ndarray):
            self._label(value, label)
            self._compare_numbers(label, value.nbytes, value.tobytes)
        elif isinstance(value, contextvars.ContextVar):
            self._label(value, label)
            read = functools.partial(value.get, None)
            self._values[id(value), label] = Value(label, read, read(), self._line())
            self._reach(read(), label)
        elif isinstance(value, type):
            self._reach_class(value)
        elif isinstance(value, types.ModuleType):
            self._reach_module(value)
        else:
            self._reach_object(value, label)

    def _reach_tensor(self, tensor: Tensor, label: str) -> None:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return
        self._tensors[id(tensor)] = (tensor, label)
        if tensor.device.type not in (self._device.type, "meta"):
            self._compare_numbers(
                label, tensor.nbytes, lambda: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )

    def _compare_numbers(self, label: str, size: int, read: Any) -> None:
        if size > MAX_BYTES:
            self._problem(
                f"reads {label}, {size / 2**20:.0f} MiB on the host: register it as a buffer ({self._line()})"
            )
        else:
            self._values[id(read), label] = Value(f"the numbers in {label}", read, read(), self._line())

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

    def _reach_function(self, function: types.FunctionType, label: str) -> None:
        torchs_own = self._origin(function.__code__.co_filename) != "other"
        if not torchs_own:
            for default in function.__defaults__ or ():
                self._reach(default, f"a default of {function.__qualname__}")
            for name, default in (function.__kwdefaults__ or {}).items():
                self._reach(default, f"{name} of {function.__qualname__}")
            names = self._names_of(vars(function), f"{function.__qualname__}.", function)
            for name, value in vars(function).items():
                self._expect(names, name, value, (id(function), name))
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

    def _reach_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not self._is_library(base) and not issubclass(base, enum.Enum) and id(base) not in self._labels:
                self._label(base, f"{base.__qualname__}.")
                names = self._names_of(vars(base), f"{base.__qualname__}.", base)
                for name, value in list(vars(base).items()):
                    if not name.startswith("__"):
                        names.expected.setdefault(name, value)
                        if not isinstance(value, types.FunctionType | type):
                            self._reach(value, f"{base.__qualname__}.{name}")

    def _reach_module(self, module: types.ModuleType) -> None:
        file = getattr(module, "__file__", None)
        if file is None or self._origin(file) != "other" or "site-packages" in file:
            return
        self._label(module, f"{module.__name__}.")
        cls = type(module)
        if cls is types.ModuleType:
            watched = type("module", (types.ModuleType,), {})
            module.__class__ = watched
            self._undo.callback(setattr, module, "__class__", cls)
            self._patch(watched)

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
                    f"reads {label} ({self._line()}), of type {kind}, whose state nothing could compare later"
                )
                if hasattr(cls, "__next__"):
                    raise Unrepeatable

    def _is_harmless(self, cls: type) -> bool:
        """Whether what objects of ``cls`` hold decides nothing: torch's small types, and ours around regions."""
        if _top(cls) in ("torch", "numpy", "triton") or cls.__module__ in ("_thread", "types", "typing", "threading"):
            return True
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        return cls.__module__.startswith("_cython") or (file is not None and _is_ours(file))

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _undo_effects(self) -> None:
        """Report what the call has left changed on the host, and put it back."""
        for names in self._names.values():
            for name, before in names.expected.items():
                if not same(names.mapping.get(name, _GONE), before):
                    self._changes(names.named(name))
                    if isinstance(names.mapping, dict):
                        names.mapping[name] = before
                    else:
                        setattr(names.owner, name, before)
        for obj, name, label, before, line in self._written.values():
            if not same(getattr(obj, name, _GONE), before):
                self._changes(f"{label}{name} ({line})")
                with contextlib.suppress(AttributeError):
                    delattr(obj, name) if before is _GONE else setattr(obj, name, before)
        for entry in self._contents.values():
            if not is_unchanged(entry):
                self._changes(f"the entries of {entry[1]}")
                _refill(entry[0], entry[2])
        for value in self._values.values():
            if not same(value.read(), value.expected):
                self._changes(str(value))
                if isinstance(cell := getattr(value.read, "args", (None,))[0], types.CellType):
                    cell.cell_contents = value.expected
        for label, generator, before in self._generators.values():
            if _generator_state(generator) != before:
                self._problem(f"draws random numbers on the host from {label}: draw them on the device")
                _set_generator_state(generator, before)

    def _changes(self, what: str) -> None:
        self._problem(f"changes {what}, which a replay would not")

    # ---- small things --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def _label(self, value: Any, label: str) -> None:
        self._labels[id(value)] = label
        self._kept.append(value)  # an id is only its own as long as it lives

    def _of(self, obj: Any) -> Names:
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            attributes = {}
        return self._names_of(attributes, self._labels[id(obj)], obj)

    def _names_of(self, mapping: Any, label: str, key: Any) -> Names:
        if id(key) not in self._names:
            self._kept.append(key)
            self._names[id(key)] = Names(mapping, label, owner=key)
        return self._names[id(key)]

    def _problem(self, reason: str) -> None:
        self._problems.setdefault(reason)

    def _found_on_class(self, cls: type, name: str) -> tuple[type | None, Any]:
        key = (cls, name)
        if key not in self._static:
            owner = next((base for base in cls.__mro__ if name in base.__dict__), None)
            self._static[key] = (owner, None if owner is None else owner.__dict__[name])
        return self._static[key]

    def _is_library(self, cls: type) -> bool:
        top = _top(cls)
        return top in TORCH_AND_LIGHTNING or top in sys.stdlib_module_names

    def _origin(self, filename: str) -> str:
        """``torch`` (and Lightning, numpy and this project), ``stdlib`` or ``other``."""
        if filename not in self._files:
            self._files[filename] = origin_of(filename)
        return self._files[filename]

    def _line(self) -> str:
        """File and line of the nearest code that is neither torch's nor the standard library's."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._origin(frame.f_code.co_filename) == "other":
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def origin_of(filename: str) -> str:
    """``torch`` (and Lightning, numpy and this project), ``stdlib`` or ``other``."""
    path = Path(filename)
    if filename.startswith(("<", _TORCH)) or _is_ours(filename):
        return "torch"
    for part in ("site-packages", "dist-packages"):
        if part in path.parts:
            return "torch" if path.parts[path.parts.index(part) + 1] in TORCH_AND_LIGHTNING else "other"
    return "stdlib" if filename.startswith(_STDLIB) else "other"


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _top(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _refill(container: Any, entries: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(entries) // 2
        container.update(zip(entries[:half], entries[half:], strict=True))
    elif isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        # One on a device advances within a graph, or its capture fails.
        return generator.get_state().numpy().tobytes() if generator.device.type == "cpu" else None
    return pickle.dumps(_bits(generator).state)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        _bits(generator).state = pickle.loads(state)


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator._bit_generator


def _random_states(device: torch.device) -> tuple[Any, ...]:
    """Python's and numpy's global generators, and torch's on the host where that is not the device's own."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    states = random.getstate(), kind, numpy.asarray(keys).tobytes(), tuple(rest)
    return states if device.type == "cpu" else (*states, bytes(torch.get_rng_state().numpy()))
