"""What a run leaves in its folder: a record and checkpoints. Each folder belongs to one run, and none replaces the work
of another. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import zipfile
from pathlib import Path

from trainer.telemetry.record import FILE_NAME, RunRecord

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


def taken(folder: Path, resume: str | None) -> str | None:
    """Why a run that resumes ``resume`` may not write into ``folder``; None when it may."""
    if resume is not None:
        # Not by Path.resolve, which raises a RuntimeError for a symbolic link that leads to itself.
        given = Path(os.path.realpath(Path(resume).expanduser()))
        if Path(os.path.realpath(folder)) in (given, *given.parents):
            return None
    if (folder / FILE_NAME).exists():
        what = "the record of another run"
    elif (folder / DIRECTORY / LAST).exists():
        what = "the checkpoint of another run"
    else:
        return None
    resume = shlex.quote(f"resume={folder}")
    return f"hydra.run.dir={folder}: holds {what}; choose another folder, or continue that run by {resume}"


def claim(record: RunRecord, folder: Path, resume: str | None) -> bytes | None:
    """Write the first ``record`` into ``folder``; returns the one that it replaces, of the run that is resumed.

    Raises ValueError when the folder is another run's, OSError when nothing can be written there.
    """
    if (complaint := taken(folder, resume)) is not None:
        raise ValueError(complaint)
    file = folder / FILE_NAME
    if file.exists():
        before = file.read_bytes()
        record.save(folder)
        return before
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file.open("x").close()  # of two runs that get here at once, one succeeds
        record.save(folder)
    except FileExistsError as error:
        raise ValueError(f"hydra.run.dir={folder}: another run has just started in it") from error
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return None


def restore_file(before: bytes | None, folder: Path) -> None:
    """After a refusal: the record that ``claim`` has replaced, or none, so that the folder can be used again."""
    file = folder / FILE_NAME
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(before)


def release(folder: Path) -> None:
    """Remove a folder that this process has claimed and not used."""
    if {each.name for each in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder)
