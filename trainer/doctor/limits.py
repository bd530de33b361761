"""What this process may use of the machine: processors and memory, by the kernel's account and the container's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.doctor.finding import Finding, ok, warning

GIB = 1 << 30
LITTLE_MEMORY_GIB = 4.0
"""Importing torch and Inductor and compiling in a few processes takes about three."""
CGROUPS = Path("/sys/fs/cgroup")


def limits(cgroups: Path = CGROUPS) -> Iterator[Finding]:
    """A line for processors and one for memory."""
    yield processors(allowed_processors(), quota(cgroups), os.environ.get("OMP_NUM_THREADS"))
    available = available_gib()
    limit = memory_limit_gib(cgroups)
    least = min((value for value in (available, limit) if value is not None), default=None)
    if least is None:
        return
    said = f"{least:.1f} GiB free" + ("" if limit is None else f" (the container may use {limit:.1f} more)")
    if least < LITTLE_MEMORY_GIB:
        mend = "close something, or set TORCHINDUCTOR_COMPILE_THREADS=1: each compiling process takes memory"
        yield warning("memory", said, mend)
    else:
        yield ok("memory", said)


def processors(allowed: int, quota: float | None, threads: str | None) -> Finding:
    """Whether torch would start more threads than it gets processors for."""
    if quota is None or quota >= allowed:
        return ok("processors", f"{allowed} (of {os.cpu_count()} in the machine)")
    said = f"{allowed} are seen, the container gets the time of {quota:g}"
    if threads is not None:
        return ok("processors", f"{said}; OMP_NUM_THREADS={threads}")
    fitting = max(1, int(quota))
    return warning(
        "processors",
        said,
        f"set OMP_NUM_THREADS={fitting} and TORCHINDUCTOR_COMPILE_THREADS={fitting}: more threads wait in turns",
    )


def allowed_processors() -> int:
    """Logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(cgroups: Path) -> float | None:
    """Processors whose time the container gets, by cgroup version 2 or 1; None without a limit."""
    two = _words(cgroups / "cpu.max")
    one = [*_words(cgroups / "cpu" / "cpu.cfs_quota_us"), *_words(cgroups / "cpu" / "cpu.cfs_period_us")]
    for words in (two, one):
        if len(words) == 2 and words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def memory_limit_gib(cgroups: Path) -> float | None:
    """Memory that the container may still take; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _words(cgroups / limit), _words(cgroups / used)
        # Version 1 writes a number near 2**63 for none.
        if most and now and most[0] != "max" and int(most[0]) < 1 << 60:
            return (int(most[0]) - int(now[0])) / GIB
    return None


def available_gib() -> float | None:
    """Memory that can be had without swapping; None where /proc does not tell."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB
    return None


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
