"""Host state: the Python values that a call has read, which distinguish a captured graph of it from others.

A CUDA graph calls no Python when it is replayed. Which kernels it holds, and with which numbers, was decided by what
the call read on the host while it was captured. ``HostState`` holds these values and compares them before each replay;
``strategies.cuda_graph.host_recorder`` records them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.region_state import entries_of

PLAIN = (bool, int, float, complex, str, bytes, type(None))
EQUAL = (*PLAIN, torch.device, torch.dtype)  # compared by value
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
"""Containers, and their subclasses, whose entries are compared."""
GONE = object()
"""Stands for an attribute that is not there."""


@dataclass(slots=True)
class Value:
    """One value that is read anew and compared: an attribute, a global, a property, the numbers of an array."""

    label: str
    read: Callable[[], Any]
    expected: Any
    where: str = ""

    def __str__(self) -> str:
        return f"{self.label} ({self.where})" if self.where else self.label


def named(mapping: Mapping[str, Any], name: str, value: Any, label: str, where: str = "") -> Value:
    """A name in ``mapping``: an attribute, a global, a parameter; GONE where it is found elsewhere, or nowhere."""
    return Value(f"{label}{name}", partial(mapping.get, name, GONE), value, where)


class Change(NamedTuple):
    """A value that is not what it was."""

    what: str
    how: str
    """In words, with the line that reads it and the way out."""


class HostState:
    """What a call read on the host, as it was then: ``values``, to be read anew, and the entries of containers (by
    identity, plain values by value). Of tensors it is storage, shape and ``requires_grad``."""

    def __init__(
        self,
        values: Sequence[Value] = (),
        contents: Sequence[tuple[Any, str, Any]] = (),
        tensors: Sequence[tuple[Tensor, str]] = (),
    ) -> None:
        self._values, self._contents, self._tensors = [*values], contents, tensors
        self._prints = self._fingerprints()
        self._quick: _Quick | None = None
        self.add(Value("torch's global settings (autocast, TF32, ...)", torch_modes, torch_modes()))
        self.add(Value("the environment (os.environ)", environment, environment()))

    def add(self, value: Value) -> None:
        self._values.append(value)
        self._quick = None

    def changes(self) -> Iterator[Change]:
        if self._quick is None:
            self._quick = _Quick(self._values, self._contents)
        if self._quick.unchanged() and self._fingerprints() == self._prints:
            return
        found = False
        for found_now in self._changes():
            found = True
            yield found_now
        if not found:
            self._quick.sort()

    def _changes(self) -> Iterator[Change]:
        for value in self._values:
            now = value.read()
            if now is not value.expected and not same(now, value.expected):
                yield Change(str(value), difference(str(value), value.expected, now))
        for entry in self._contents:
            container, label, then = entry
            if (container or then) and (how := changed_entry(*entry)) is not None:  # most are empty: a module's hooks
                yield Change(f"the entries of {label}", how)
        for (_, what), then, now in zip(self._tensors, self._prints, self._fingerprints(), strict=True):
            if now != then:
                how = f"{what} has another storage, shape, requires_grad or hook than before"
                yield Change(what, how)

    def _fingerprints(self) -> list[tuple[int, Any]]:
        return [(tensor.data_ptr(), fingerprint(tensor)) for tensor, _ in self._tensors]


class _Quick:
    """Tells in a tenth of the time that nothing has changed: a model of 400 modules has thousands of values.

    Most are the same objects as ever, attributes that are looked up in a module's own dictionary. Those are read
    together for each dictionary, and compared by identity.
    """

    def __init__(self, values: Sequence[Value], contents: Sequence[tuple[Any, str, Any]]) -> None:
        self._values = values
        self._equal: set[int] = set()
        """Places of values that are equal to what they were, and other objects: numbers that are computed anew."""
        self._empty = [container for container, _, then in contents if not then]
        self._filled = [entry for entry in contents if entry[2]]
        self.sort()

    def sort(self) -> None:
        """Look which values are the same objects."""
        names: dict[int, tuple[dict[str, Any], list[str], list[Any]]] = {}
        self._reads: list[Callable[[], Any]] = []
        self._expected: list[Any] = []
        for place, value in enumerate(self._values):
            if place in self._equal or value.read() is not value.expected:
                self._equal.add(place)
                continue
            mapping, name = _looked_up(value.read)
            if mapping is not None and name in mapping:
                _, of_it, expected = names.setdefault(id(mapping), (mapping, [], []))
                of_it.append(name)
                expected.append(value.expected)
            else:
                self._reads.append(value.read)
                self._expected.append(value.expected)
        self._mappings = [mapping for mapping, _, _ in names.values()]
        self._getters = [itemgetter(*of_it, of_it[0]) for _, of_it, _ in names.values()]  # two at least: a tuple
        self._found = [one for _, _, expected in names.values() for one in (*expected, expected[0])]
        self._others = [self._values[place] for place in self._equal]

    def unchanged(self) -> bool:
        """False where something may have changed."""
        try:
            found = chain.from_iterable(map(call, self._getters, self._mappings))
            if not all(map(is_, found, self._found)):
                return False
        except KeyError:
            return False
        return (
            all(map(is_, map(call, self._reads), self._expected))
            and not any(self._empty)
            and all(same(value.read(), value.expected) for value in self._others)
            and all(changed_entry(*entry) is None for entry in self._filled)
        )


def _looked_up(read: Callable[[], Any]) -> tuple[dict[str, Any] | None, str]:
    """The dictionary that ``read`` looks into, and the name; see ``named``."""
    if isinstance(read, partial) and not read.keywords and len(read.args) == 2 and read.args[1] is GONE:
        mapping = getattr(read.func, "__self__", None)
        if type(mapping) is dict:
            return mapping, read.args[0]
    return None, ""


def difference(label: str, then: Any, now: Any) -> str:
    """One value that changed, and what to do about it."""
    if then is GONE:
        return f"{label} was not there before"
    if isinstance(now, Tensor):
        return f"{label} is another tensor than before: fill it in place (copy_) instead of replacing it"
    if isinstance(now, bytes) or isinstance(then, bytes):
        return f"{label} change: register it as a buffer"
    if isinstance(now, PLAIN) and isinstance(then, PLAIN):
        seen = f"{label} changes ({_short(then)}, then {_short(now)})"
        number = isinstance(now, int | float) and not isinstance(now, bool)
        return f"{seen}: register it as a buffer and fill it in place" if number else seen
    both = isinstance(now, tuple) and isinstance(then, tuple)
    return f"{label} changed" if both else f"{label} is another object than before"


def same(now: Any, then: Any) -> bool:
    """Whether a call could not tell ``now`` from ``then``; containers and objects are compared by identity."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, EQUAL):
        return bool(now == then) or (now != now and then != then)
    if isinstance(now, MethodType):
        return now.__self__ is then.__self__ and now.__func__ is then.__func__
    if isinstance(now, list | tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, dict):
        return list(now) == list(then) and all(map(same, now.values(), then.values()))
    return False


def changed_entry(container: Any, label: str, then: Any) -> str | None:
    """The first entry of a container that is not what it was, in words; None where all are."""
    if isinstance(container, set) and container == then:
        return None
    now = entries_of(container)
    if len(now) == len(then) and (all(map(is_, now, then)) or all(map(same, now, then))):
        return None
    if isinstance(then, tuple) and len(now) == len(then):
        half = len(then) // 2 if isinstance(container, Mapping) else 0
        for place, (new, old) in enumerate(zip(now, then, strict=True)):
            if not same(new, old):
                key = now[place - half] if half else place
                return difference(f"{label}[{key!r}]" if isinstance(key, PLAIN) else label, old, new)
    return f"{label} has other entries than before" if then else f"{label} was empty"


fingerprint = attrgetter("shape", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
"""What decides about kernels, and calls on the host, beside a tensor's numbers and storage."""


def torch_modes() -> tuple[Any, ...]:
    """Process-wide settings of torch that decide which kernels run, and hooks on all modules."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cuda"),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_forward_pre_hooks),
        len(nn.modules.module._global_backward_hooks),
    )


def backward_hooks(module: nn.Module) -> Iterator[str]:
    """Hooks that run on the host in a backward, in words."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"a backward hook on {path or 'the module'} runs on the host"


def environment() -> tuple[int]:
    """Another one once the process's environment has changed."""
    return (hash(frozenset(os.environ._data.items())),)  # type: ignore[attr-defined]


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
