"""Ledger: ``sweep.json``, what a sweep planned and how far it got, so that a sweep that was killed continues.

``python -m trainer -m sweep=DIR`` stands for the command that the sweep was started with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.sweep.environment import ROOT
from trainer.sweep.plan import Key, PlannedCell, quoted
from trainer.telemetry.files import build, read_json, write_json

FILE_NAME = "sweep.json"
LOCK_NAME = ".sweep.lock"
SCHEMA = 1
CONFIG_DIR = ("--config-dir", "-cd")
HARMLESS = re.compile(
    r"[+~]*+(?!hydra\b)[^=]+(=|$)|[+~]*hydra(\.(launcher|sweeper|sweep|run|mode)\b|/(launcher|sweeper)=)"
)
"""Overrides that run no code by themselves: of the configuration, and of how a sweep goes."""
CODE = re.compile(r"_target_|slurm_setup|slurm_additional|\bcached\b.*\b(url|key_file|storage_options)\b")
"""What does so in spite of that: classes by name, shell commands, artifacts that are loaded."""


@dataclass(kw_only=True, slots=True)
class Entry:
    """One cell, as far as it got."""

    number: int
    overrides: list[str]
    round: int | None = None
    copy: int = 0
    start: str | None = None
    directory: str
    """Relative to the sweep's."""
    state: str = "planned"
    """``planned``, ``running``, ``finished``, ``failed`` or ``interrupted``."""
    exit_code: int | None = None
    reason: str | None = None
    seconds: float | None = None
    code: dict[str, str] = field(default_factory=dict)
    """Version of the code that ran it."""
    host: str | None = None
    pid: int | None = None
    """Of the cell's process, while it runs."""
    job_id: str | None = None
    """Of the cluster's job that runs it."""

    @property
    def key(self) -> Key:
        return (tuple(self.overrides), self.round, self.copy)


@dataclass(kw_only=True, slots=True)
class Contents:
    """What ``sweep.json`` holds; see ``Ledger``."""

    schema: int = SCHEMA
    go_on_with: str = ""
    working_directory: str
    arguments: list[str]
    state: str
    cells: list[Entry]


@dataclass(kw_only=True, slots=True)
class Ledger:
    """The contents of ``sweep.json``, written whole at every change."""

    directory: Path
    arguments: list[str] = field(default_factory=list)
    """The command line of the sweep, without the program."""
    working_directory: str = ""
    state: str = "running"
    """``running``, ``finished`` (all cells did), ``failed`` (some did not) or ``stopped`` (by a signal)."""
    entries: dict[Key, Entry] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Ledger | None:
        """Read the sweep of ``directory``; None when there is none. Raises ValueError for a file that is not ours."""
        file = directory / FILE_NAME
        if not file.is_file():
            return None
        values = read_json(file, "a sweep of ours")
        try:
            if values["schema"] != SCHEMA:
                raise ValueError(f"{file}: sweep schema {values['schema']}, this version reads {SCHEMA}")
            contents = build(Contents, values)
            for entry in contents.cells:  # what lies in a cell's folder is moved and removed
                if not (directory / entry.directory).resolve().is_relative_to(directory.resolve()):
                    raise ValueError(f"{file}: the folder {entry.directory} of a cell lies outside")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a sweep of ours ({error})") from error
        return cls(
            directory=directory,
            arguments=contents.arguments,
            working_directory=contents.working_directory,
            state=contents.state,
            entries={entry.key: entry for entry in contents.cells},
        )

    def save(self) -> None:
        """Write the file so that a reader sees the old one or the new one whole."""
        contents = Contents(
            go_on_with=self.go_on_with(),
            working_directory=self.working_directory,
            arguments=self.arguments,
            state=self.state,
            cells=list(self.entries.values()),
        )
        write_json(self.directory / FILE_NAME, asdict(contents))

    @property
    def of_peers(self) -> bool:
        """Whether these are the runs of ``scripts.benchmark_peers``, which keeps the same kind of file."""
        return any(word.startswith("--out") for word in self.arguments)

    def go_on_with(self) -> str:
        """The shell's line that continues these runs."""
        if self.of_peers:
            return shlex.join(["python", "-m", "scripts.benchmark_peers", *self.arguments])
        again = filter(names_code, whole(self.arguments))
        return shlex.join(["python", "-m", "trainer", "-m", f"sweep={self.directory}", *again])

    def enter(self, cell: PlannedCell) -> Entry:
        """The entry of a planned cell, made when the sweep has none yet; gives the cell its number and directory."""
        entry = self.entries.get(cell.key)
        if entry is None:
            entry = self.entries[cell.key] = Entry(
                number=cell.number,
                overrides=list(cell.overrides),
                round=cell.round,
                copy=cell.copy,
                start=cell.start,
                directory=str(cell.directory.relative_to(self.directory)),
            )
        cell.number, cell.directory = entry.number, self.directory / entry.directory
        return entry

    def next_number(self) -> int:
        """The first number that no cell has."""
        return max((entry.number for entry in self.entries.values()), default=-1) + 1

    def note(self, cell: PlannedCell, **changes: Any) -> None:
        """Change a cell's entry and write the file."""
        entry = self.entries[cell.key]
        for name, value in changes.items():
            setattr(entry, name, value)
        self.save()

    def unplanned(self, cells: Sequence[PlannedCell]) -> list[Entry]:
        """Entries that ``cells`` do not ask for: the command has changed since."""
        keys = {cell.key for cell in cells}
        return [entry for key, entry in self.entries.items() if key not in keys]


def names_code(argument: str) -> bool:
    """Whether an argument of a command line can make it run code: a plug-in, a class by name, another configuration."""
    if argument in ("-m", "--multirun"):
        return False
    return HARMLESS.match(argument) is None or argument.startswith("-") or CODE.search(argument) is not None


def whole(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with each flag and its value as one: ``--config-dir=mine``."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch(r"-(?!m$|-multirun$)[^=]+", joined[-1]) and not argument.startswith("-"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep other sweeps out of ``directory``, until the block ends or the process dies.

    Raises ValueError when one is in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"hydra.sweep.dir={directory}: another process is running this sweep") from error
        except OSError:
            pass  # a file system without locks
        yield


OPTION = "sweep="
SWEEP_DIRECTORY = "hydra.sweep.dir"
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
        return ["-m", *others, f"{SWEEP_DIRECTORY}={quoted(directory)}"]
    if ledger.of_peers:
        raise ValueError(f"{chosen[-1]}: runs beside peers, and no sweep; continue with: {ledger.go_on_with()}")
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
    return ["-m", *_merged([*before, *given, f"{SWEEP_DIRECTORY}={quoted(directory)}"])]


def _require_word(sweep: str, before: Sequence[str], given: Sequence[str], working_directory: Path) -> None:
    """Raise ValueError for what would run code that ``sweep.json`` alone names: a file can be anyone's.

    Whoever gives such an option again, or works in the sweep's working directory, means it.
    """
    names = {_name(argument) for argument in given}
    unconfirmed = [argument for argument in before if names_code(argument) and _name(argument) not in names]
    if unconfirmed:
        plugins = [Path(argument.partition("=")[2], "plugin.py") for argument in unconfirmed if argument[0] == "-"]
        runs = "".join(f" (runs {plugin})" for plugin in plugins if plugin.is_file())
        raise ValueError(
            f"{sweep}: its {FILE_NAME} names what can run code{runs}; if you trust it, say so by giving it again: "
            f"{sweep} {shlex.join(unconfirmed)}"
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
