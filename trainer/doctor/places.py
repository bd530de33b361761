"""The folders that compiling and training write to: writable, by nobody else, with room; their files may be run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strategies.cached.store import distrust_of
from strategies.toolchain import cache_directories, unwritable
from trainer.doctor.finding import Finding, error, ok, warning

GIB = 1 << 30
LITTLE_GIB, NONE_GIB = 2.0, 0.1
"""A cold compile of a model of ordinary size writes some hundred MiB."""
FEW_FILES = 10_000
"""Inodes; every kernel is several small files."""
SHARED = Path("/dev/shm")
LITTLE_SHARED_GIB = 1.0


def places() -> Iterator[Finding]:
    """A line for each folder."""
    for variable, directory in cache_directories().items():
        name = "inductor cache" if "INDUCTOR" in variable else "triton cache"
        yield place(name, directory, f"set {variable} to a folder on another disk", runs_files=True)
    yield place("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")
    yield place("here", Path.cwd(), "work in another folder, or set hydra.run.dir: runs leave their files here")
    if SHARED.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED).total / GIB)


def place(name: str, directory: Path, other: str, *, runs_files: bool = False) -> Finding:
    """What there is to say of one folder; ``other`` is how to choose another one."""
    if reason := unwritable(directory):
        return error(name, f"{directory} cannot be written to: {reason}", other)
    system = os.statvfs(directory)
    if runs_files and system.f_flag & getattr(os, "ST_NOEXEC", 0):
        return error(name, f"{directory} is mounted noexec: compiled code cannot be loaded from it", other)
    free_gib, files = system.f_bavail * system.f_frsize / GIB, system.f_favail
    said = f"{directory}, {free_gib:.1f} GiB free"
    if free_gib < NONE_GIB:
        return error(name, f"{directory} is full: {free_gib * 1024:.0f} MiB free", other)
    if runs_files and (reason := distrust_of(os.path.realpath(directory))):
        said = f"{directory}: {reason}, and compiled code in it is unpickled and loaded"
        return warning(name, said, other.replace("on another disk", "that only you can write"))
    if free_gib < LITTLE_GIB:
        return warning(name, said, other)
    if system.f_files and files < FEW_FILES:  # some file systems count none
        return warning(name, f"{said}, but only {files} more files fit", other)
    return ok(name, said)


def shared_memory(total_gib: float) -> Finding:
    """Data workers hand batches over in shared memory; a container has 64 MiB of it by default."""
    said = f"{SHARED} holds {total_gib:.2f} GiB"
    if total_gib < LITTLE_SHARED_GIB:
        mend = "docker run --shm-size=8g (or --ipc=host), or task.data.num_workers=0"
        return warning("shared memory", f"{said}: workers of a data loader may die of it", mend)
    return ok("shared memory", said)
