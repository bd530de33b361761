"""Arguments of scripts that look at a training: the trainer's overrides, and the files that they write."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.process import StopRequest
    from trainer.settings import Config

REFUSED = 2
"""Exit code of wrong arguments, and of what the system refuses."""


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


def parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser of ``python -m scripts.NAME``, which takes the trainer's overrides and ``--config-dir``."""
    made = argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=description.splitlines()[0],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m trainer")
    made.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for python -m trainer")
    return made


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A length of time above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def exit_code(work: Callable[[StopRequest], int], *, interrupted: str) -> int:
    """What ``work`` returns; errors of the user and the system, and signals, are a line and an exit code."""
    from trainer import errors
    from trainer.process import Interrupted, StopRequest

    try:
        with StopRequest(print) as stop:
            return work(stop)
    except errors.REFUSALS as error:
        errors.report(error)
    except OSError as error:
        errors.report_system(error)
    except Interrupted as signal:
        print(f"interrupted ({signal}): {interrupted}", file=sys.stderr)
        return 128 + signal.signum
    return REFUSED
