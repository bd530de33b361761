"""Folders of runs: each belongs to one run, and none replaces the work of another. Part of the Hydra edge; no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from trainer.sweep import environment
from trainer.sweep.processes import CHECKPOINT
from trainer.telemetry.record import FILE_NAME, RunRecord

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Environment variables of a process's rank; the first that is set counts, as in Lightning."""


class OwnFolder(Callback):
    """Hydra's callback that finds a folder of its own for a run or sweep that is named after the time it began."""

    place: ClassVar[str] = ""
    """The folder, as the option that chooses it."""
    wanted: ClassVar[Path] = Path()
    """Where this process would leave its run, where it did not follow the first one."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Claim the folder before Hydra writes into it; keep Hydra out of a folder that is another's."""
        first, launch = is_first_process(), environment.launched(os.environ)
        if launch is not None and launch.job is not None:
            _name_after_job(config.hydra.run, launch.job)
        elif first:
            _claim_time(config.hydra.run, config.hydra.output_subdir or "")
        OwnFolder.place = f"hydra.run.dir={config.hydra.run.dir}"
        OwnFolder.wanted = Path(config.hydra.run.dir).absolute()
        if not first or taken(OwnFolder.wanted, config.resume):
            with read_write(config):
                config.hydra.output_subdir = None
                if launch is not None and not first:
                    config.hydra.run.dir = "."  # Hydra makes it: on this host, or by this clock, there need be none

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _claim_time(config.hydra.sweep, "")
        OwnFolder.place = f"hydra.sweep.dir={config.hydra.sweep.dir}"


def _claim_time(node: DictConfig, within: str) -> None:
    """Set ``node.dir``, where it holds a time, to the first of ``dir``, ``dir-2``, ... that nobody has claimed.

    Whoever creates ``within`` it owns it. (Other processes of the run may have created the folder itself.)
    """
    wanted = Path(node.dir)
    for number in itertools.count(1) if "${now:" in _written(node) else ():
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            (folder / within).parent.mkdir(parents=True, exist_ok=True)
            (folder / within).mkdir()
        except OSError as error:
            if isinstance(error, FileExistsError) and (folder / within).exists():
                continue
            return  # Hydra meets the same error, and may raise it
        with read_write(node):
            node.dir = str(folder)
        return


def _written(node: DictConfig) -> str:
    """``node.dir`` as it was written, with its resolvers."""
    values: Any = OmegaConf.to_container(node, resolve=False)
    return str(values["dir"])


def _name_after_job(node: DictConfig, job: str) -> None:
    """Put SLURM's ``job`` in the place of the time in ``node.dir``: all processes name one folder then, and so does
    the job when it is put into the queue again."""
    with read_write(node):
        node.dir = re.sub(r"\$\{now:[^}]*\}", f"slurm-{job}", _written(node))


def is_first_process() -> bool:
    """Whether this process, by its environment, is the one that claims and writes."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0"


def taken(folder: Path, resume: str | None) -> str | None:
    """Why a run that resumes ``resume`` may not write into ``folder``; None when it may."""
    if resume is not None and folder.resolve() in (given := Path(resume).expanduser().resolve(), *given.parents):
        return None
    if (folder / FILE_NAME).exists() and not _was_refused(folder):
        what = "the record of another run"
    elif (folder / CHECKPOINT).exists():
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
    if file.exists() and not _was_refused(folder):
        before = file.read_bytes()
        record.save(folder)
        return before
    folder.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    try:
        file.open("x").close()  # of two runs that get here at once, one succeeds
        record.save(folder)
    except FileExistsError as error:
        raise ValueError(f"hydra.run.dir={folder}: another run has just started in it") from error
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return None


def release(folder: Path) -> None:
    """Remove a folder that this process has claimed and not used."""
    if {each.name for each in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder)


def _was_refused(folder: Path) -> bool:
    """Whether the record in ``folder`` is of a run that was refused before any work."""
    with contextlib.suppress(ValueError):
        record = RunRecord.load(folder)
        said = record.total_seconds is not None  # else it was killed, after any number of steps
        return record.status == "failed" and said and not record.steps and not (folder / "error.log").exists()
    return False
