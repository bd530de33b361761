"""Host recorder: records every Python value that a real step reads while it runs, and leaves the step alone.

Reads of attributes are seen by a ``__getattribute__`` that classes have while the recorder is on; reads of globals
and calls into C by ``sys.setprofile``. What is read is followed: containers into their entries, functions into their
closures and defaults. What the step changes on the host is a problem, and so is what nothing could compare later (a
clock, an iterator): a graph of that step could not stand for it. All of it stays as the step has left it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from strategies.compile_errors import origin_of, users_line
from strategies.cuda_graph.batch_index import IndexWatch
from strategies.cuda_graph.host_state import GONE, HostState, Value, named
from strategies.cuda_graph.host_values import LIGHTNING, HostValues, random_states, top_of
from strategies.torch_patches import reset_fsdp_state

_PURE = """builtins math cmath _operator itertools _functools functools _collections collections _abc _bisect _heapq
_struct _sre re _string _warnings _thread _weakref _typing typing _json _csv array _copy copyreg _contextvars _ast _stat
_statistics _decimal sys gc _queue _imp _codecs _locale _weakrefset inspect random _random unicodedata"""
PURE_STDLIB = frozenset(_PURE.split())
"""Modules whose C functions bring nothing from outside; the global generators are compared by state."""


IGNORED = ("log", "log_dict", "_current_fx_name")
"""Attributes of which a step makes no other use than to log: a replay logs what was recorded. The last one is
Lightning's name of the hook under way."""


class HostRecorder(HostValues):
    """Records one step."""

    def __init__(self, device: torch.device, problem_types: Mapping[type, str]) -> None:
        super().__init__(device, problem_types)
        self._codes: set[types.CodeType] = set()
        self._found_on_class: Any = functools.cache(found_on_class)
        self._thread = threading.get_ident()
        self._written: set[tuple[int, str]] = set()
        self._shards: dict[tuple[int, str], Any] = {}
        """Sharded parameters, whose place is taken by what was gathered for the length of a forward."""
        self._index: IndexWatch | None = None
        self._entry: types.CodeType | None = None
        self._outermost = 0
        """Identity of the outermost frame of the user's that is under way: what the loop reads around it is its own."""

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
