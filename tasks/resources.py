"""What a run needs of this machine's memory, processes and files, against what there is; all of it in bytes.

Only what certainly cannot be had is refused. Where the system does not tell (no /proc), nothing is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

Made = TypeVar("Made")

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MIN_EXAMPLE_BYTES = 64
"""Bytes of an entry of a list in memory: the pointer and the smallest string or tensor."""


def require_memory(what: str, needed: int, *, more: int | None = None, on: tuple[int, int] | None = None) -> None:
    """Raise ValueError where ``what`` needs more memory than there is; warn where it needs more than is free.

    Args:
        what: Names the options.
        needed: Bytes, at least.
        more: Of them, with what else is probably needed, those that are not taken yet; None: all of ``needed``.
        on: Free and all bytes of a device; None: of this machine.
    """
    free, total = on or (free_bytes(), total_bytes())
    place = "this machine" if on is None else "the device"
    if total is not None and needed > total:
        raise ValueError(f"{what}: needs at least {gib(needed)} of memory, {place} has {gib(total)}")
    more = needed if more is None else more
    if free is not None and more > free:
        print(f"warning: {what}: needs at least {gib(more)} more memory, {place} has {gib(free)} free", file=sys.stderr)


def gib(size: int) -> str:
    """``size`` bytes in the unit of all messages."""
    return f"{size / GIB:,.2f} GiB"


def total_bytes() -> int | None:
    """Memory and swap of this machine, or what of it the container may take; None where the kernel does not tell."""
    machine, swap, container = _meminfo("MemTotal"), _meminfo("SwapTotal") or 0, _container()
    if machine is None:
        return None
    return (machine if container is None else min(machine, container[0])) + swap


def free_bytes() -> int | None:
    """Memory that can be had without swapping, and within the container; None where the kernel does not tell."""
    container = _container()
    sizes = (_meminfo("MemAvailable"), None if container is None else container[0] - container[1])
    return min((size for size in sizes if size is not None), default=None)


def words(file: Path) -> list[str]:
    """Words of a file of the kernel's; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _meminfo(name: str) -> int | None:
    found = words(PROC / "meminfo")
    return int(found[found.index(f"{name}:") + 1]) * 1024 if f"{name}:" in found else None


def _container() -> tuple[int, int] | None:
    """Most memory of the container and what it uses for good; None without a limit."""
    most, now = words(CGROUPS / "memory.max"), words(CGROUPS / "memory.current")
    if not most or not now or most[0] == "max":
        return None
    stat = words(CGROUPS / "memory.stat")
    # Of what files are read into, the kernel takes this back first.
    cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return int(most[0]), int(now[0]) - cached


def cache_folder() -> Path:
    """The user's cache folder for this project (``$XDG_CACHE_HOME/crucible`` or ``~/.cache/crucible``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crucible"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write beside ``path`` and rename, so that processes that start together never read half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads.
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def load_or_make(
    name: str,
    *,
    load: Callable[[Path], Made],
    make: Callable[[], Made],
    write: Callable[[IO[bytes], Made], object],
) -> Made:
    """Load the file ``name`` of the user's cache; else make its content, and keep it there.

    A file that does not load (an older library's format, a full disk) is made again. Where the cache cannot be written,
    the content lives in memory only.
    """
    path = cache_folder() / name
    with suppress(Exception):
        if path.is_file():
            return load(path)
    made = make()
    with suppress(OSError):
        write_atomically(path, lambda file: write(file, made))
    return made
