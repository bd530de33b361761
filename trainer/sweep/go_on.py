"""Go on with a sweep: ``python -m trainer -m sweep=DIR`` stands for the command that the sweep was started with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.sweep.ledger import FILE_NAME, Ledger
from trainer.sweep.quoting import quoted

OPTION = "sweep="
DIRECTORY = "hydra.sweep.dir"
"""What the option is to Hydra."""
MULTIRUN = ("-m", "--multirun")


def expanded(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with ``sweep=DIR`` replaced by the command that ``DIR/sweep.json`` holds; further ones come after
    it, and win. A directory without a sweep becomes the directory of a new one, when there is anything else to run.

    Goes to the working directory of the sweep, which its paths are relative to. Raises ValueError for a directory
    without a sweep where nothing else is given, or with the runs of something else.
    """
    chosen = [argument for argument in arguments if argument.startswith(OPTION)]
    if not chosen:
        return list(arguments)
    directory = Path(chosen[-1].removeprefix(OPTION)).expanduser()
    others = [argument for argument in arguments if argument not in (*chosen, *MULTIRUN)]
    ledger = Ledger.load(directory)
    if ledger is None:
        if not others:
            raise ValueError(f"{chosen[-1]}: no {FILE_NAME} in it, and nothing else to run")
        return ["-m", *others, f"{DIRECTORY}={quoted(directory)}"]
    if ledger.of_peers:
        raise ValueError(f"{chosen[-1]}: runs beside peers, and no sweep; go on with: {ledger.go_on_with()}")
    directory = directory.resolve()
    if not Path(ledger.working_directory).is_dir():
        raise ValueError(f"{chosen[-1]}: its working directory {ledger.working_directory} is no more")
    os.chdir(ledger.working_directory)
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    before = [argument for argument in ledger.arguments if argument not in MULTIRUN]
    return ["-m", *_merged([*before, *others, f"{DIRECTORY}={quoted(directory)}"])]


def _merged(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that a later one of the same name replaces."""
    last = {_name(argument): index for index, argument in enumerate(arguments)}
    return [argument for index, argument in enumerate(arguments) if last[_name(argument)] == index]


def _name(argument: str) -> str:
    return argument.partition("=")[0]
