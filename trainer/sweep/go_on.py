"""Go on with a sweep: ``python -m trainer -m sweep=DIR`` stands for the command that the sweep was started with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer.sweep.code_version import ROOT
from trainer.sweep.ledger import CONFIG_DIR, FILE_NAME, Ledger, names_code, whole
from trainer.sweep.quoting import quoted

OPTION = "sweep="
DIRECTORY = "hydra.sweep.dir"
"""What the option is to Hydra."""
MULTIRUN = ("-m", "--multirun")


def expanded(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with ``sweep=DIR`` replaced by the command that ``DIR/sweep.json`` holds; further ones come after
    it, and win. A directory without a sweep becomes the directory of a new one, when there is anything else to run.

    Goes to the working directory of the sweep, which its paths are relative to. Raises ValueError for a directory
    without a sweep where nothing else is given, or with the runs of something else, and for a command that names code
    to run which is not given again.
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
    working_directory = Path(ledger.working_directory)
    if not working_directory.is_dir():
        raise ValueError(f"{chosen[-1]}: its working directory {working_directory} is no more")
    before = [_from(working_directory, word) for word in whole(ledger.arguments) if word not in MULTIRUN]
    given = [_from(Path.cwd(), word) for word in whole(others)]
    _require_word(chosen[-1], before, given, working_directory)
    os.chdir(working_directory)
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    return ["-m", *_merged([*before, *given, f"{DIRECTORY}={quoted(directory)}"])]


def _require_word(sweep: str, before: Sequence[str], given: Sequence[str], working_directory: Path) -> None:
    """Raise ValueError for what would run code that ``sweep.json`` alone names: a file can be anyone's.

    Whoever gives such an option again, or works in the sweep's working directory, has said that it is meant.
    """
    names = {_name(argument) for argument in given}
    unsaid = [argument for argument in before if names_code(argument) and _name(argument) not in names]
    if unsaid:
        plugins = [Path(argument.partition("=")[2], "plugin.py") for argument in unsaid if argument[0] == "-"]
        runs = "".join(f" (runs {plugin})" for plugin in plugins if plugin.is_file())
        raise ValueError(
            f"{sweep}: its {FILE_NAME} names what can run code{runs}; if you trust it, say so by giving it again: "
            f"{sweep} {shlex.join(unsaid)}"
        )
    importable = [*working_directory.glob("*.py"), *working_directory.glob("*/__init__.py")]
    if importable and working_directory.resolve() not in (Path.cwd(), ROOT):
        raise ValueError(
            f"{sweep}: it ran in {working_directory}, whose Python files can be imported; if you trust them, go there "
            "first"
        )


def _from(folder: Path, argument: str) -> str:
    """An argument that was given in ``folder``: ``--config-dir`` with an absolute path, others as they are."""
    name, _, value = argument.partition("=")
    return f"{CONFIG_DIR[0]}={folder / Path(value).expanduser()}" if name in CONFIG_DIR and value else argument


def _merged(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that a later one of the same name replaces."""
    last = {_name(argument): index for index, argument in enumerate(arguments)}
    return [argument for index, argument in enumerate(arguments) if last[_name(argument)] == index]


def _name(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]
