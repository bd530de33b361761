"""Generated: what Inductor's files are called, by the graph that they hold, and how many kernels are in them."""

from __future__ import annotations

import re
from pathlib import Path

AOT_ID = re.compile(r"^# AOT ID: \['(?P<graph>\w+)'\]", re.M)

KERNEL = re.compile(r"= async_compile\.\w+\(")
"""Each kernel that a file launches, in C++ a function of one or more loops. Torch's own count is one of loops there."""


def kernels_in(file: Path) -> int:
    """Kernels that Inductor wrote into one file."""
    return len(KERNEL.findall(file.read_text(encoding="utf-8", errors="replace")))


def name_of(file: Path) -> str:
    """``<graph>_<forward, backward or inference>-<hash>.py``; the file's own name where it does not say."""
    found = AOT_ID.search(file.read_text(encoding="utf-8", errors="replace")[:2000])
    return f"{found['graph']}-{file.stem[:8]}.py" if found else file.name
