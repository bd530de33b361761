"""Cell environment: what a sweep tells the process of a cell, and the compile caches that a process starts with.

``repeat=cold`` and ``repeat=warm`` are about directories in environment variables, which must be set before torch is
imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "CRUCIBLE_CELL"
"""Holds a ``CellEnvironment`` as JSON in the process of a cell."""
DIRECTORY = "caches"
"""Below a run's or a sweep's directory."""
PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>: the signal that a process gets when its parent dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnvironment:
    """What a cell's process is told."""

    parent: int
    """Process that started it."""
    round: int | None = None
    start: str | None = None
    """``cold`` or ``warm``: what the caches are that it got; None when they were left as they are."""

    def variables(self) -> dict[str, str]:
        """Environment variables of the cell's process."""
        return {VARIABLE: json.dumps(asdict(self))}


def current() -> CellEnvironment | None:
    """What the sweep told this process; None when it is no cell, or not the cell's first process."""
    text = os.environ.get(VARIABLE)
    return None if text is None else CellEnvironment(**json.loads(text))


def end_with_parent() -> None:
    """Ask the kernel (Linux) for a SIGTERM when the sweep dies, even by SIGKILL: the cell then stops with a checkpoint.

    A cell that went on alone would write into a directory that a resumed sweep has given to another process.
    """
    cell = current()
    if cell is not None and cell.parent == os.getppid() and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def cache_variables(caches: Path, *, store: bool = True) -> dict[str, str]:
    """Environment variables that make ``caches`` the place of all compile caches, and of ``compile=cached``'s store."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **({"CRUCIBLE_CACHE_URL": str(caches / "artifacts")} if store else {}),
    }


@contextlib.contextmanager
def starting_caches(repeat: str | None, run_dir: Path) -> Iterator[None]:
    """Give this process, when it is no cell of a sweep, the caches that ``repeat`` asks for; to be entered before torch
    is imported. Raises ValueError for ``warm``, which takes another process before it."""
    cell = current()
    if repeat is None or (cell is not None and cell.start == repeat):
        yield
        return
    if repeat == "warm":
        raise ValueError(
            "repeat='warm' starts on the caches that a cold run of the same command has filled: use -m repeat=cold,warm"
        )
    caches = (run_dir / DIRECTORY).resolve()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        shutil.rmtree(caches, ignore_errors=True)
    os.environ.update(cache_variables(caches))
    try:
        yield
    finally:
        if first:
            shutil.rmtree(caches, ignore_errors=True)
