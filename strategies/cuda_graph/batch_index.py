"""The number of a batch, observed: whether a step makes use of it, while it behaves like any other number.

Most steps are given a batch index and hand it on to a helper at most. C code that takes a number calls no method of it,
so that methods alone do not tell. Each call that receives the number is looked at instead: it makes use of it where it
loads it at more places than those from which a Python function was seen to receive it. The places are those that were
reached, as ``sys.settrace`` tells; all that there are where a debugger has the only trace function.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strategies.compile_errors import origin_of


class Index(int):
    """A number that notes each use of one of its methods."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (int(self),)

    def __copy__(self) -> int:
        return int(self)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


_DUNDERS = """bool index int float eq ne lt le gt ge hash repr str format add radd sub rsub mul rmul truediv rtruediv
floordiv rfloordiv mod rmod divmod rdivmod pow rpow neg pos abs and rand or ror xor rxor lshift rlshift rshift rrshift
invert round trunc floor ceil"""


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    @functools.wraps(method)
    def noted(self: Index, *others: Any) -> Any:
        watch: IndexWatch | None = vars(self).get("watch")
        if watch is not None:
            watch.method_called()
        return method(self, *others)

    return noted


for _name in _DUNDERS.split():
    setattr(Index, f"__{_name}__", _noting(f"__{_name}__"))


class _Frame:
    """A call under way that was given the number."""

    __slots__ = ("code", "handed", "loads", "names", "reached")

    def __init__(self, code: types.CodeType, names: list[str]) -> None:
        self.code, self.names = code, names
        self.loads = {place for place, loaded in _loads(code).items() if not loaded.isdisjoint(names)}
        """Places in the code that load the number."""
        self.handed: dict[int, int] = {}
        """By the place in the code: how often the number was received from there at once."""
        self.reached: set[int] | None = None
        """Places that were reached; None where nobody tells."""

    def trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if self.reached is None:
            self.reached = set()
        if event == "opcode":
            self.reached.add(frame.f_lasti)
        return self.trace


class IndexWatch:
    """Watches what becomes of ``index`` from the first code of the user's on that is given it."""

    def __init__(self, index: int) -> None:
        self.index = Index(index)
        vars(self.index)["watch"] = self
        self.used: str | None = None
        """Where it was made use of, ``file:line``; None so far."""
        self._frames: dict[int, _Frame] = {}
        self._traces = False

    def close(self) -> None:
        """From now on it is a number like others."""
        vars(self.index).clear()
        self._frames.clear()

    def called(self, frame: types.FrameType) -> None:
        """A Python function is called, or a generator goes on."""
        code = frame.f_code
        if self.used is not None or not (code.co_argcount or code.co_kwonlyargcount or code.co_flags & _VARIABLE):
            return
        index, names = self.index, []
        given = frame.f_locals
        for name in code.co_varnames[: _arguments(code)]:
            value = given.get(name)
            if value is index or (
                (type(value) is tuple and any(one is index for one in value))
                or (type(value) is dict and any(one is index for one in value.values()))
            ):
                names.append(name)
        if not names:
            return
        caller = None if frame.f_back is None else self._frames.get(id(frame.f_back))
        if caller is not None:
            assert frame.f_back is not None
            place = frame.f_back.f_lasti
            caller.handed[place] = max(len(names), caller.handed.get(place, 0))
        elif origin_of(code.co_filename) != "other":
            return  # the loop, on the way to the user's code
        known = self._frames[id(frame)] = _Frame(code, names)
        if self._traces:
            frame.f_trace_lines, frame.f_trace_opcodes, frame.f_trace = False, True, known.trace

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, the code that is looked at tells which places of it are reached."""
        self._traces = sys.gettrace() is None
        if self._traces:
            sys.settrace(_trace_none)  # without one, Python traces nothing
        try:
            yield
        finally:
            if sys.gettrace() is _trace_none:
                sys.settrace(None)
            self._traces = False

    def returned(self, frame: types.FrameType) -> None:
        """A call is over, one way or another."""
        known = self._frames.pop(id(frame), None)
        if known is None or self.used is not None:
            return
        code, handed = known.code, sum(known.handed.values())
        seen = len(known.loads if known.reached is None else known.loads & known.reached)
        # Library code hands on all of its arguments, by one of several ways: calls of modules do.
        variable = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount : _arguments(code)])
        if seen <= handed or (handed and set(known.names) <= variable and origin_of(code.co_filename) != "other"):
            return
        self._use(f"{Path(code.co_filename).name}:{code.co_firstlineno}")

    def method_called(self) -> None:
        """Of the number itself; it counts where code that was given it is under way."""
        if self._frames and self.used is None:
            code = next(reversed(self._frames.values())).code
            self._use(f"{Path(code.co_filename).name}:{code.co_firstlineno}")

    def _use(self, where: str) -> None:
        self.used = where


_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
"""Flags of code that takes ``*args`` or ``**kwargs``."""


def _arguments(code: types.CodeType) -> int:
    """How many of the local names are arguments."""
    return code.co_argcount + code.co_kwonlyargcount + (code.co_flags & _VARIABLE).bit_count()


@functools.cache
def _loads(code: types.CodeType) -> dict[int, frozenset[str]]:
    """The local names that ``code`` loads, by place."""
    found: dict[int, frozenset[str]] = {}
    for one in dis.get_instructions(code):
        if one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST_LOAD_FAST")):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            found[one.offset] = frozenset(names[-1:] if one.opname.startswith("STORE") else names)
    return found


def _trace_none(*_: Any) -> None: ...
