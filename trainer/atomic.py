"""Write a file whole or not at all: beside its target, synced, then renamed. Needs neither torch nor Lightning."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def finite(value: Any) -> Any:
    """``value`` with None for every number in it that JSON has no word for: NaN, infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def written_whole(target: Path, mode: str) -> Iterator[IO[Any]]:
    """A file to write in ``mode`` (``w``: UTF-8 text, ``wb``: bytes) that becomes ``target`` when the block ends.

    A reader sees the old file or the new one, never a half; when the block raises, the old one stays and nothing else
    is left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
