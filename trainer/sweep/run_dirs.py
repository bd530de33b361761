"""Folders of runs: each belongs to one run, and none replaces the work of another. Part of the Hydra edge; no torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from trainer.checkpoint_files import DIRECTORY, LAST
from trainer.process import detect_launch, is_first_process
from trainer.telemetry.record import FILE_NAME, RunRecord

CHECKPOINT = Path(DIRECTORY) / LAST
"""Where a run leaves its checkpoint."""


class OwnFolder(Callback):
    """Hydra's callback that looks at the folder of a run or sweep before anything is written into it."""

    place: ClassVar[str] = ""
    """The folder, as the option that chooses it."""
    wanted: ClassVar[Path] = Path()
    """Where this process would leave its run, where it did not follow the first one."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Name the folder after SLURM's job; keep Hydra out of a folder that is another's."""
        first, launch = is_first_process(), detect_launch(os.environ)
        if launch is not None and launch.job is not None:
            # Not the time: all processes name one folder then, and so does the job when it is put into the queue again.
            written: Any = OmegaConf.to_container(config.hydra.run, resolve=False)
            with read_write(config):
                config.hydra.run.dir = re.sub(r"\$\{now:[^}]*\}", f"slurm-{launch.job}", written["dir"])
        OwnFolder.place = f"hydra.run.dir={config.hydra.run.dir}"
        OwnFolder.wanted = Path(config.hydra.run.dir).absolute()
        if not first or taken(OwnFolder.wanted, config.resume):
            with read_write(config):
                config.hydra.output_subdir = None
                if launch is not None and not first:
                    config.hydra.run.dir = "."  # Hydra makes it: on this host, or by this clock, there need be none

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        OwnFolder.place = f"hydra.sweep.dir={config.hydra.sweep.dir}"


def taken(folder: Path, resume: str | None) -> str | None:
    """Why a run that resumes ``resume`` may not write into ``folder``; None when it may."""
    if resume is not None:
        # Not by Path.resolve, which raises a RuntimeError for a symbolic link that leads to itself.
        given = Path(os.path.realpath(Path(resume).expanduser()))
        if Path(os.path.realpath(folder)) in (given, *given.parents):
            return None
    if (folder / FILE_NAME).exists():
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
