"""Energy of the accelerator's board from NVML's total-energy counter, over windows of seconds.

The counter refreshes every 20 to 100 ms and covers the whole board, other processes included, so that single steps
cannot be told apart and short windows are worth nothing: windows under ``SHORTEST_SECONDS`` in total give None.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

SHORTEST_SECONDS = 2.0
PAUSES = {"validating": "validation", "saving": "checkpoint", "profiling": "profile", "finishing": None}
"""Phase of ``PhaseEnergy`` by the telemetry's word for a pause; after the last one nothing is counted."""


class EnergyMeter:
    """Adds up joules and samples of windows; absent NVML makes it a meter that reads None."""

    def __init__(self, device: torch.device) -> None:
        self.handle = _nvml_handle(device) if device.type == "cuda" else None
        """NVML's of the board; None without NVML."""
        self._window: tuple[float, float] | None = None
        self._window_samples = 0
        self._joules = 0.0
        self._seconds = 0.0
        self._samples = 0

    @property
    def reader(self) -> Callable[[], float] | None:
        """Reads the board's joules so far; None without NVML."""
        return self._read_joules if self.handle is not None else None

    def begin(self) -> None:
        """Open a window, unless one is open."""
        if self.handle is not None and self._window is None:
            self._window, self._window_samples = (self._read_joules(), time.perf_counter()), 0

    def add(self, samples: int) -> None:
        """Count samples trained in the open window."""
        self._window_samples += samples

    def end(self) -> None:
        """Close the window and add it up."""
        if self._window is not None:
            joules, began = self._window
            self._joules += self._read_joules() - joules
            self._seconds += time.perf_counter() - began
            self._samples += self._window_samples
            self._window = None

    def discard(self) -> None:
        """Close the window and forget it: something that is not a steady step happened in it."""
        self._window = None

    def joules_per_sample(self) -> float | None:
        """Joules for each sample; None without NVML or when the windows together are too short to mean anything."""
        if self.handle is None or not self._samples or self._seconds < SHORTEST_SECONDS:
            return None
        return self._joules / self._samples

    def _read_joules(self) -> float:
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3


class PhaseEnergy:
    """Joules of each phase of a run. Read when the host changes phase, which a device that lags behind has not yet.

    Args:
        read: Joules of the board so far; None = there is no counter.
    """

    def __init__(self, read: Callable[[], float] | None) -> None:
        self._read = read
        self._phase: str | None = None
        self._began = (0.0, 0.0)
        self._joules: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: str | None) -> None:
        """``phase`` begins and the one before it ends; None ends it alone."""
        if self._read is None or phase == self._phase:
            return
        joules, now = self._read(), time.perf_counter()
        if self._phase is not None:
            self._joules[self._phase] += joules - self._began[0]
            self._seconds[self._phase] += now - self._began[1]
        self._phase, self._began = phase, (joules, now)

    def figures(self) -> dict[str, float]:
        """Joules by phase, of those that are long enough for the counter."""
        return {name: joules for name, joules in self._joules.items() if self._seconds[name] >= SHORTEST_SECONDS}


def _nvml_handle(device: torch.device) -> Any | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID, because NVML numbers all boards and ignores CUDA_VISIBLE_DEVICES.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # older boards refuse
        return handle
    except Exception:  # NVML raises classes of its own for each of its errors; any of them means: no energy figure
        return None
