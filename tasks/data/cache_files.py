"""Files that are kept for the next run: where they lie, and how they are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO


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
