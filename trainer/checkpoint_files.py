"""Files of checkpoints: where a run leaves them, and which one ``resume=`` means. Imports no torch."""

from __future__ import annotations

import zipfile
from pathlib import Path

DIRECTORY = "checkpoints"
LAST = "last.ckpt"
META = "meta.pt"
INDEX = ".metadata"
"""Names that Lightning and torch give the two files of a directory that are not tensors."""


def is_directory(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that several processes have written."""
    return (path / META).is_file() and (path / INDEX).is_file()


def beside(path: Path, what: str) -> Path:
    """``new``: where a checkpoint is written until it is whole. ``old``: where the one before it stays until then."""
    return path.with_name(f".{path.name}.{what}")


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that ``resume=<run directory or checkpoint>`` means. Raises ValueError when there is no whole
    one."""
    given = Path(resume).expanduser()
    named = [given / DIRECTORY / LAST, given / LAST] if given.is_dir() and not is_directory(given) else [given]
    candidates = [*named, *(beside(path, "old") for path in named)]  # one that was being replaced by a directory
    found = next((path for path in candidates if path.is_file() or is_directory(path)), None)
    if found is None:
        what = f"no {DIRECTORY}/{LAST} in it" if given.is_dir() else "no such file or directory"
        raise ValueError(f"resume={resume}: {what}")
    # A torch checkpoint is a zip file, whose directory stands at its end.
    if found.is_file() and not zipfile.is_zipfile(found):
        raise ValueError(f"resume={resume}: {found.name} is not a whole checkpoint")
    return found
