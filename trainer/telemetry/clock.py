"""Step clocks: how long each optimizer step took, without ever waiting for the device while it trains.

On CUDA a pair of events brackets each step, so that the time is the device's own, idle gaps between launches included;
elapsed times are read later, when the events have long completed. Elsewhere the host's monotonic clock serves.
"""

from __future__ import annotations

import time
from collections import deque

import torch


class HostClock:
    """Laps by the host's monotonic clock."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: deque[float] = deque()

    def mark(self) -> None:
        """Begin a lap here; what went on since the last one (validation, a checkpoint) belongs to no lap."""
        self._last = time.perf_counter()

    def lap(self) -> None:
        """End a lap and begin the next."""
        now = time.perf_counter()
        self._laps.append(now - self._last)
        self._last = now

    def ready(self) -> int:
        """Number of laps that can be read without waiting."""
        return len(self._laps)

    def take(self) -> float:
        """Seconds of the oldest lap not yet taken."""
        return self._laps.popleft()


class CudaClock:
    """Laps by CUDA events on the current stream; ``take`` waits only for a lap that is not ready."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._laps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last = self._record()

    def _record(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """Begin a lap here; what went on since the last one (validation, a checkpoint) belongs to no lap."""
        self._last = self._record()

    def lap(self) -> None:
        """End a lap and begin the next."""
        event = self._record()
        self._laps.append((self._last, event))
        self._last = event

    def ready(self) -> int:
        """Number of laps that can be read without waiting."""
        count = 0
        for _, end in self._laps:
            if not end.query():
                break
            count += 1
        return count

    def take(self) -> float:
        """Seconds of the oldest lap not yet taken."""
        begin, end = self._laps.popleft()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        self._pool.append(begin)  # laps are read in order, so no later lap begins with this event
        return seconds


StepClock = HostClock | CudaClock


def step_clock(device: torch.device) -> StepClock:
    """The clock that fits ``device``."""
    return CudaClock() if device.type == "cuda" else HostClock()
