"""What this process may use of the machine: processors and memory, by the kernel's account and the container's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tasks.resources import CGROUPS, available_gib, memory_limit_gib, words
from trainer.doctor.finding import Finding, ok, warning

LITTLE_MEMORY_GIB = 4.0
"""Importing torch and Inductor and compiling in a few processes takes about three."""


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
    two = words(cgroups / "cpu.max")
    one = [*words(cgroups / "cpu" / "cpu.cfs_quota_us"), *words(cgroups / "cpu" / "cpu.cfs_period_us")]
    for given in (two, one):
        if len(given) == 2 and given[0] not in ("max", "-1"):
            return int(given[0]) / int(given[1])
    return None
