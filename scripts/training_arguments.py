"""Arguments of scripts that look at a training: the trainer's overrides, and the files that they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.settings import Config


def composed_training(overrides: list[str], *, config_dir: str | None, looks: str) -> tuple[Config, list[str]]:
    """The configuration, with ``compile=whole`` where no strategy is named, and its overrides.

    ``looks`` says who looks at what, for the message. Raises ValueError.
    """
    from strategies import Whole
    from trainer.config import compose

    config = compose(overrides, config_dir=config_dir)
    named = any(override.lstrip("+~").startswith(("compile=", "compile.")) for override in overrides)
    if not config.compile and not named:
        # Not composed again: a plugin.py need not bear to be run twice.
        overrides, config = [*overrides, "compile=whole"], dataclasses.replace(config, compile={"whole": Whole()})
    if config.run.name != "train":
        raise ValueError(f"run={config.run.name}: {looks} training steps; leave run= out")
    return config, overrides


def check_file(option: str, file: Path | None) -> None:
    """Raise ValueError, before any work, for a file that cannot be written."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ValueError(f"--{option}={str(file)!r} is a folder, or lies in none")


def check_folder(option: str, folder: Path | None) -> None:
    """Raise ValueError, before any work, for a folder that something else stands in the place of."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--{option}={str(folder)!r} is not a folder")
