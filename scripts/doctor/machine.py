"""Machine: what this process may use of its processors and memory, who else uses them now, and its folders."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.doctor.finding import Finding, error, ok, warning
from strategies.cached.store import distrust_of
from strategies.toolchain import cache_directories, unwritable
from tasks.resources import CGROUPS, available_gib, memory_limit_gib, words
from trainer.telemetry.machine import MUCH_USE, MachineFacts, MachineMonitor

GIB = 1 << 30
LITTLE_DISK_GIB, NO_DISK_GIB = 2.0, 0.1
"""A cold compile of a model of ordinary size writes some hundred MiB."""
FEW_FILES = 10_000
"""Inodes; every kernel is several small files."""
SHARED = Path("/dev/shm")
LITTLE_SHARED_GIB = 1.0
LITTLE_MEMORY_GIB = 4.0
"""Importing torch and Inductor and compiling in a few processes takes about three."""
BUSY_SECONDS = 0.6
WAIT = "wait until it is quiet, or measure elsewhere: runs record it, and comparisons of such runs have no verdict"


def places() -> Iterator[Finding]:
    """A line for each folder that compiling and training write to."""
    for variable, directory in cache_directories().items():
        name = "inductor cache" if "INDUCTOR" in variable else "triton cache"
        yield place(name, directory, f"set {variable} to a folder on another disk", runs_files=True)
    yield place("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")
    yield place("here", Path.cwd(), "work in another folder, or set hydra.run.dir: runs leave their files here")
    if SHARED.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED).total / GIB)


def place(name: str, directory: Path, other: str, *, runs_files: bool = False) -> Finding:
    """Whether a folder can be written to, by nobody else, with room; ``other`` is how to choose another one."""
    if reason := unwritable(directory):
        return error(name, f"{directory} cannot be written to: {reason}", other)
    system = os.statvfs(directory)
    if runs_files and system.f_flag & getattr(os, "ST_NOEXEC", 0):
        return error(name, f"{directory} is mounted noexec: compiled code cannot be loaded from it", other)
    free_gib, files = system.f_bavail * system.f_frsize / GIB, system.f_favail
    message = f"{directory}, {free_gib:.1f} GiB free"
    if free_gib < NO_DISK_GIB:
        return error(name, f"{directory} is full: {free_gib * 1024:.0f} MiB free", other)
    if runs_files and (reason := distrust_of(os.path.realpath(directory))):
        message = f"{directory}: {reason}, and compiled code in it is unpickled and loaded"
        return warning(name, message, other.replace("on another disk", "that only you can write"))
    if free_gib < LITTLE_DISK_GIB:
        return warning(name, message, other)
    if system.f_files and files < FEW_FILES:  # some file systems count none
        return warning(name, f"{message}, but only {files} more files fit", other)
    return ok(name, message)


def shared_memory(total_gib: float) -> Finding:
    """Data workers hand batches over in shared memory; a container has 64 MiB of it by default."""
    message = f"{SHARED} holds {total_gib:.2f} GiB"
    if total_gib < LITTLE_SHARED_GIB:
        fix = "docker run --shm-size=8g (or --ipc=host), or task.data.num_workers=0"
        return warning("shared memory", f"{message}: workers of a data loader may die of it", fix)
    return ok("shared memory", message)


def limits(cgroups: Path = CGROUPS) -> Iterator[Finding]:
    """A line for processors and one for memory, by the kernel's account and the container's."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield processors(allowed, quota(cgroups), os.environ.get("OMP_NUM_THREADS"))
    limit = memory_limit_gib(cgroups)
    free = min((value for value in (available_gib(), limit) if value is not None), default=None)
    if free is None:
        return
    message = f"{free:.1f} GiB free" + ("" if limit is None else f" (the container may use {limit:.1f} more)")
    if free < LITTLE_MEMORY_GIB:
        fix = "close something, or set TORCHINDUCTOR_COMPILE_THREADS=1: each compiling process takes memory"
        yield warning("memory", message, fix)
    else:
        yield ok("memory", message)


def processors(allowed: int, quota: float | None, threads: str | None) -> Finding:
    """Whether torch would start more threads than it gets processors for."""
    if quota is None or quota >= allowed:
        return ok("processors", f"{allowed} (of {os.cpu_count()} in the machine)")
    message = f"{allowed} are seen, the container gets the time of {quota:g}"
    if threads is not None:
        return ok("processors", f"{message}; OMP_NUM_THREADS={threads}")
    fitting = max(1, int(quota))
    fix = f"set OMP_NUM_THREADS={fitting} and TORCHINDUCTOR_COMPILE_THREADS={fitting}: more threads wait in a queue"
    return warning("processors", message, fix)


def quota(cgroups: Path) -> float | None:
    """Processors whose time the container gets, by cgroup version 2 or 1; None without a limit."""
    two = words(cgroups / "cpu.max")
    one = [*words(cgroups / "cpu" / "cpu.cfs_quota_us"), *words(cgroups / "cpu" / "cpu.cfs_period_us")]
    for given in (two, one):
        if len(given) == 2 and given[0] not in ("max", "-1"):
            return int(given[0]) / int(given[1])
    return None


def busy(seconds: float = BUSY_SECONDS) -> Iterator[Finding]:
    """Whether somebody else uses the machine now: a line for the processors, and one for each NVIDIA board."""
    watch = MachineMonitor()
    watch.begin()
    time.sleep(seconds)
    facts = watch.facts(shortest=0.0)
    if facts is not None and facts.other_processors is not None:
        facts.waited_share = None  # of this process, which slept
        yield others(facts)
    try:
        import pynvml

        pynvml.nvmlInit()
        found = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in found]
    except Exception:  # not installed, or no driver, or no board that tells
        return
    for number, (handle, share) in enumerate(zip(found, used, strict=True)):
        yield board(number, handle, share)


def others(facts: MachineFacts) -> Finding:
    """What others take of the processors."""
    assert facts.other_processors is not None
    if facts.busy is not None:
        return warning("machine", f"busy: {facts.busy}", WAIT)
    load = "" if facts.load_average is None else f"load {facts.load_average:.2g} on {facts.processors} cores, "
    return ok("machine", f"{load}others take {facts.other_processors / facts.processors:.0%} of the processor time")


def board(number: int, handle: Any, used: float) -> Finding:
    """Clock and power of one board, which computes ``used`` of the time, and why it is slow."""
    watch = MachineMonitor(handle)
    watch.begin()
    watch.look()
    facts = watch.facts(shortest=0.0)
    assert facts is not None
    message = f"computes {used:.0%} of the time"
    if facts.gpu_power_watts is not None and facts.gpu_power_limit_watts is not None:
        message += f", {facts.gpu_power_watts:.0f} of {facts.gpu_power_limit_watts:.0f} W"
    if facts.gpu_clock_mhz is not None and facts.gpu_clock_limit_mhz is not None:
        message += f", {facts.gpu_clock_mhz} of {facts.gpu_clock_limit_mhz} MHz"
    name = f"board {number}"
    if facts.gpu_throttled:
        return warning(name, f"{message}, throttled: {', '.join(facts.gpu_throttled)}", "cool it; " + WAIT)
    return ok(name, message) if used < MUCH_USE else warning(name, message, WAIT)
