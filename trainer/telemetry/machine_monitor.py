"""Machine: the board's energy, and what else ran while steps were timed. Imports no torch.

Processor time of others is all that the processors spent less what this process and its descendants spent: data and
compile workers make load too. Others do harm where a thread of this process waited for a processor meanwhile. A
comparison asks it whether the machine was quiet; the joules per sample come from it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
MIN_SECONDS = 1.0
"""The kernel counts processor time in steps of 10 ms; a shorter look tells nothing."""
MIN_ENERGY_SECONDS = 2.0
"""NVML's counter of energy refreshes every 20 to 100 ms; steps that took less together are worth nothing."""
THROTTLED = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""NVML's reasons for a low clock that a steady machine does not have; the power cap is met under any full load."""
MANY_PROCESSORS, MUCH_TIME = 0.5, 0.1
"""Processors that others use, and their share of those there are, from which on they count: the smaller of the two."""
LONG_WAIT = 0.05
"""Share of the time that a thread of this process waited for a processor, from which on others did harm."""
MAX_TIME = 0.25
"""Share of the processors that others may use where nobody knows how long this process waited."""


@dataclass(kw_only=True, slots=True)
class MachineFacts:
    """The machine over the steady part of a run, of the process that writes the record; None = not known."""

    seconds: float
    """Length of the look."""
    processors: int
    """Logical processors that the process may run on."""
    load_average: float | None = None
    """Tasks that ran or wanted to, over the last minute, this run's own included."""
    other_processors: float | None = None
    """Processor time of all but this process and its descendants over wall time, what a hypervisor took included."""
    waited_share: float | None = None
    """Share of the time that the thread which waited longest had to wait for a processor."""
    gpu_clock_mhz: int | None = None
    """Lowest clock of the multiprocessors that was seen; one reading a log window."""
    gpu_power_watts: float | None = None
    """Highest power that was seen."""
    gpu_power_limit_watts: float | None = None
    gpu_celsius: int | None = None
    """Highest temperature that was seen."""
    gpu_throttled: list[str] = field(default_factory=list)
    """Reasons for a low clock that were seen, without the power cap."""

    @property
    def busy(self) -> str | None:
        """Why figures taken meanwhile cannot be trusted, ``load 10 on 2 cores, ...``; None where nothing was seen."""
        reasons = []
        others = self.other_processors
        if others is not None and others >= min(MANY_PROCESSORS, MUCH_TIME * self.processors):
            waited, share = self.waited_share, min(1.0, others / self.processors)
            if share >= MAX_TIME if waited is None else waited >= LONG_WAIT:
                load = "" if self.load_average is None else f"load {self.load_average:.2g} on {self.processors} cores, "
                reasons.append(f"{load}others took {share:.0%} of the processor time")
        if self.gpu_throttled:
            reasons.append(f"the GPU was throttled ({', '.join(self.gpu_throttled)})")
        return "; ".join(reasons) or None


def now() -> float:
    """Seconds of the host's clock; steps, pauses and waits are timed by it. Tests replace it here."""
    return time.perf_counter()


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in (PROC / "cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def nvml_handle(device: torch.device) -> Any | None:
    """NVML's of the board; None without NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        # By UUID, because NVML numbers all boards and ignores CUDA_VISIBLE_DEVICES.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # older boards refuse
        return handle
    except Exception:  # NVML raises classes of its own for each of its errors; any of them means: no energy figure
        return None


class EnergyMeter:
    """Adds up joules and samples of windows, of all processes on a ``board`` (NVML's handle); None without one."""

    def __init__(self, board: Any | None) -> None:
        self._board = board
        self.restart()

    def restart(self) -> None:
        self._window: tuple[float, float] | None = None
        self._window_samples = self._samples = 0
        self._joules = self._seconds = 0.0

    def step(self, samples: int) -> None:
        """A steady step is over: its samples count to the open window, or a window is opened."""
        if self._window is not None:
            self._window_samples += samples
        elif self._board is not None:
            self._window, self._window_samples = (self._read_joules(), now()), 0

    def end(self) -> None:
        """Close the window and add it up."""
        if self._window is not None:
            joules, began = self._window
            self._joules += self._read_joules() - joules
            self._seconds += now() - began
            self._samples += self._window_samples
            self._window = None

    def discard(self) -> None:
        """Close the window and forget it: something that is not a steady step happened in it."""
        self._window = None

    def joules_per_sample(self) -> float | None:
        """None without NVML, or when the windows together are too short to mean anything."""
        return self._joules / self._samples if self._samples and self._seconds >= MIN_ENERGY_SECONDS else None

    def _read_joules(self) -> float:
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._board)) / 1e3


class MachineMonitor:
    """Looks at the machine, and at NVML's ``board``, from ``begin`` on; what the system does not tell is None."""

    def __init__(self, board: Any | None = None) -> None:
        self._board = board
        self._processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._began: float | None = None
        self._facts = MachineFacts(seconds=0.0, processors=len(self._processors) or os.cpu_count() or 1)

    def begin(self) -> None:
        """The steady part begins; only the first call counts."""
        if self._began is None:
            self._ticks, self._waits = _ticks(self._processors), _waits()
            self._began = time.monotonic()

    def look(self) -> None:
        """Read the GPU's clock, power and reasons; takes about a millisecond."""
        if self._board is None or self._began is None:
            return
        import pynvml

        facts, board = self._facts, self._board
        with contextlib.suppress(Exception):  # what a board, a container or an older pynvml does not tell stays None
            clock = pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_SM)
            facts.gpu_clock_mhz = min(clock, facts.gpu_clock_mhz or clock)
            facts.gpu_power_watts = max(pynvml.nvmlDeviceGetPowerUsage(board) / 1e3, facts.gpu_power_watts or 0.0)
            facts.gpu_power_limit_watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(board)
            seen = {name for bit, name in THROTTLED.items() if reasons & bit}
            facts.gpu_throttled = sorted({*facts.gpu_throttled, *seen})
            celsius = pynvml.nvmlDeviceGetTemperature(board, pynvml.NVML_TEMPERATURE_GPU)
            facts.gpu_celsius = max(celsius, facts.gpu_celsius or celsius)

    def facts(self, *, shortest: float = MIN_SECONDS) -> MachineFacts | None:
        """What was seen since ``begin``; None where that is less than ``shortest`` seconds ago."""
        if self._began is None or (seconds := time.monotonic() - self._began) < shortest:
            return None
        facts = self._facts
        facts.seconds = seconds
        if hasattr(os, "getloadavg"):
            facts.load_average = os.getloadavg()[0]
        if self._ticks is not None and (ticks := _ticks(self._processors)) is not None:
            every, own = (max(0, after - before) for before, after in zip(self._ticks, ticks, strict=True))
            facts.other_processors = max(0.0, (every - own) / os.sysconf("SC_CLK_TCK") / seconds)
        waits = [after - self._waits[thread] for thread, after in _waits().items() if thread in self._waits]
        facts.waited_share = max(waits) / 1e9 / seconds if waits else None
        return facts


def _ticks(processors: list[int]) -> tuple[int, int] | None:
    """Clock ticks that ``processors`` have worked so far, and those of this process's tree."""
    try:
        lines = [line.split() for line in (PROC / "stat").read_text(encoding="utf-8").splitlines()]
        wanted = {f"cpu{number}" for number in processors}
        # user, nice, system, irq, softirq, steal: neither idle nor waiting for a disk
        every = sum(int(line[place]) for line in lines if line[0] in wanted for place in (1, 2, 3, 6, 7, 8))
        own = sum(_tree().values())
    except (OSError, ValueError, IndexError):
        return None
    return (every, own) if wanted and own else None


def _tree() -> dict[int, int]:
    """Clock ticks of each process of this run, with those of its children that have ended."""
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                words = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                ticks[int(entry.name)] = sum(map(int, words[11:15]))
                children[int(words[1])].append(int(entry.name))
    # Beside each other, the ranks of torchrun and Slurm are children of one process.
    beside = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_NTASKS") or 1) > 1
    found = [os.getppid() if beside else os.getpid()]
    for process in found:
        found += children[process]
    return {process: ticks[process] for process in found if process in ticks}


def _waits() -> dict[str, int]:
    """Nanoseconds that each thread of this process has waited for a processor so far."""
    try:
        tasks = list((PROC / "self" / "task").iterdir())
        return {task.name: int((task / "schedstat").read_text(encoding="utf-8").split()[1]) for task in tasks}
    except (OSError, ValueError, IndexError):
        return {}
