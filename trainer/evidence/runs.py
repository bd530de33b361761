"""Runs on disk: records found in files, run folders, globs and folders searched to the bottom."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.printable import printable
from trainer.telemetry.record import FILE_NAME, RunRecord


@dataclass(frozen=True, slots=True)
class Run:
    """One run that left a record."""

    directory: Path
    """Where the record lies."""
    record: RunRecord


def find(paths: Iterable[str | Path], *, unreadable: Callable[[str], None] | None = None) -> list[Run]:
    """All runs below ``paths``, each once, in the order given and by name within one path.

    Args:
        paths: Record files, run folders, folders that hold such folders at any depth, or globs of these.
        unreadable: Called with the reason for a record that a search came upon and that cannot be read.

    Raises:
        ValueError: A path that does not exist or holds no record, or a record that cannot be read: one that was given
            by its own name, or any when ``unreadable`` is None.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        files = _record_files(path)
        for file in files:
            if (key := file.resolve()) in found:
                continue
            try:
                found[key] = Run(file.parent, RunRecord.load(file))
            except ValueError as error:
                if unreadable is None or len(files) == 1:
                    raise
                unreadable(printable(str(error)))
    return list(found.values())


def _record_files(path: str | Path) -> list[Path]:
    """Record files at ``path``, sorted. Raises ValueError when there is none."""
    given = Path(path)
    # What exists by that name is no pattern: Hydra writes brackets and equals signs into names of folders.
    matches = [given] if given.exists() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise ValueError(f"{path}: no such file or folder")
    files: list[Path] = []
    for match in matches:
        files += sorted(match.rglob(FILE_NAME)) if match.is_dir() else [match]
    if not files:
        raise ValueError(f"{path}: no {FILE_NAME} in it or below")
    return files
