"""Data wait: how much of a step is lost because the loop waits for its next batch, measured without waiting.

Lost is what the device does not do. On CUDA the host runs ahead, so that it may wait for the loader while the device
still has work: an event before the loop asks for a batch and one when it has it are that far apart on the device only
when the device had nothing else to do meanwhile. Elsewhere the host's own wait is lost. Copying a batch to the device
is not part of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

HOOKS = ("_on_before_fetch", "_on_after_fetch")
"""Methods of Lightning's loops that it hands to its data fetcher, which calls them around each ``next`` of the loader.
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/fetchers.py"""


class DataWait:
    """Seconds lost to each fetch since ``watch``, oldest first."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._pool: list[torch.cuda.Event] = []
        self._waits: deque[tuple[Any, Any]] = deque()
        self._began: Any = None
        self._pending = 0
        self._loop: Any = None

    def watch(self, loop: Any) -> None:
        """Measure the fetches of one of Lightning's loops, from its next epoch on."""
        self._loop = loop
        for hook, ours in zip(HOOKS, (self.begin, self.end), strict=True):
            vars(loop)[hook] = _both(getattr(type(loop), hook).__get__(loop), ours)

    def unwatch(self) -> None:
        """Give the loop its own hooks back."""
        for hook in HOOKS if self._loop is not None else ():
            vars(self._loop).pop(hook, None)

    def begin(self) -> None:
        """The loop asks for a batch."""
        self._began = self._now()

    def end(self) -> None:
        """It has one, or there are no more."""
        if self._began is not None:
            self._waits.append((self._began, self._now()))
            self._pending += 1
            self._began = None

    def claim(self) -> int:
        """Number of fetches since the last ``claim`` or ``forget``, to be read by as many calls of ``take``."""
        pending, self._pending = self._pending, 0
        return pending

    def forget(self) -> None:
        """Leave the fetches since the last ``claim`` out: they belong to no step."""
        for _ in range(self.claim()):
            self._recycle(*self._waits.pop())

    def take(self) -> float:
        """Seconds lost to the oldest claimed fetch; waits for the device where it is not yet that far."""
        began, ended = self._waits.popleft()
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        seconds = began.elapsed_time(ended) / 1e3
        self._recycle(began, ended)
        return float(seconds)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _recycle(self, *marks: Any) -> None:
        if self._on_cuda:
            self._pool.extend(marks)


def _both(theirs: Callable[[], None], ours: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        theirs()
        ours()

    return call
