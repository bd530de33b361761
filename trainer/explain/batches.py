"""Batches: the training loader of a look, which passes on the first batches and then one of each new kind.

A recompile over an epoch comes from a shape that is new; a batch like one that was run has nothing more to tell.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

FIRST_BATCHES = 4
"""Run whatever their shape: optimizer state, gradient buffers and counters change over the first steps."""
TIMED_BATCHES = 5
"""Copies of the first batch at the end: two to settle, the others profiled."""


def kind_of(batch: Any) -> str:
    """Dtypes and shapes of everything in a batch that is a tensor, and the types of the rest, with names."""
    return ", ".join(_parts("", batch)) or "empty"


def _parts(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "scalar"
        yield f"{name} {str(value.dtype).removeprefix('torch.')} {shape}".strip()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for key, item in zip(names, value, strict=True):
            yield from _parts(f"{name}.{key}" if name else str(key), item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for option in dataclasses.fields(value):
            yield from _parts(f"{name}.{option.name}" if name else option.name, getattr(value, option.name))
    elif value is not None:
        yield f"{name} {type(value).__name__}".strip()


class ChosenBatches:
    """A loader over another one.

    Args:
        loader: What the training would iterate over.
        batches: Batches of the epoch to look at; None = all.
        seconds: So many seconds after the first batches, which may take long to compile, no further one is looked at.
        accumulate: Batches that make up an optimizer step, which is never left half done.
        timed: Whether copies of the first batch follow, to be timed.
    """

    def __init__(
        self, loader: Iterable[Any], *, batches: int | None, seconds: float, accumulate: int = 1, timed: bool = True
    ) -> None:
        self._loader, self._most, self._seconds, self._accumulate = loader, batches, seconds, accumulate
        self._timed = timed
        self.kinds: Counter[str] = Counter()
        self.looked_at = self.run = 0
        self.stopped: str | None = None
        self.timed_from: int | None = None
        """Number of the first batch, counted from 0, that is there to be timed; None before that is known."""

    def __iter__(self) -> Iterator[Any]:
        """The batches, fresh ones first."""
        began: float | None = None
        first: Any = None
        for batch in self._loader:
            kind = kind_of(batch)
            new = kind not in self.kinds
            self.kinds[kind] += 1
            self.looked_at += 1
            if first is None:
                first = _copied(batch)
            if new or self.run < FIRST_BATCHES * self._accumulate or self.run % self._accumulate:
                self.run += 1
                yield batch
            if self._most is not None and self.looked_at >= self._most:
                self.stopped = f"--batches {self._most}"
                break
            if self.run < FIRST_BATCHES * self._accumulate:
                continue
            began = began or time.perf_counter()
            if time.perf_counter() - began > self._seconds:
                self.stopped = f"--seconds {self._seconds:g} were over"
                break
        while self.run % self._accumulate:
            self.run += 1
            yield _copied(first)
        self.timed_from = self.run
        for _ in range(TIMED_BATCHES * self._accumulate if self._timed and first is not None else 0):
            yield _copied(first)


def _copied(batch: Any) -> Any:
    """A batch that a step may change."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a class that refuses; then steps get the same object
        return batch
