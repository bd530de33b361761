"""Ledger: ``sweep.json``, what a sweep planned and how far it got, so that a sweep that was killed continues.

A command with ``sweep=DIR`` starts a sweep in ``DIR``, and continues it when it is given again.
"""

from __future__ import annotations

import contextlib
import fcntl
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.sweep.plan import Key, PlannedCell, quoted
from trainer.telemetry.files import build, read_json, write_json

FILE_NAME = "sweep.json"
LOCK_NAME = ".sweep.lock"
SCHEMA = 2
OPTION = "sweep="
SWEEP_DIRECTORY = "hydra.sweep.dir"
"""What the option is to Hydra."""
MULTIRUN = ("-m", "--multirun")


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
    code: str = ""
    """Version of the code that ran it."""
    host: str | None = None
    pid: int | None = None
    """Of the cell's process, while it runs."""

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
    """Where it was given; relative paths in it begin there."""
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

    def go_on_with(self) -> str:
        """The shell's line that continues these runs."""
        given = [word for word in self.arguments if not word.startswith(f"{SWEEP_DIRECTORY}=")]
        return shlex.join(["python", "-m", "trainer", *given, f"{OPTION}{self.directory}"])

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


def expanded(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with ``sweep=DIR`` as Hydra knows it.

    Raises ValueError where nothing else is given, with the command that continues the sweep of that directory, and for
    a directory with the runs of something else. Nothing that a file names is run unseen: it can be anyone's.
    """
    chosen = [argument for argument in arguments if argument.startswith(OPTION)]
    if not chosen:
        return list(arguments)
    directory = Path(chosen[-1].removeprefix(OPTION)).expanduser()
    others = [argument for argument in arguments if argument not in (*chosen, *MULTIRUN)]
    ledger = Ledger.load(directory)
    if not others:
        if ledger is None:
            raise ValueError(f"{chosen[-1]}: no {FILE_NAME} in it, and nothing else to run")
        raise ValueError(
            f"{chosen[-1]}: give its whole command again, in {ledger.working_directory}: {ledger.go_on_with()}"
        )
    return ["-m", *others, f"{SWEEP_DIRECTORY}={quoted(directory)}"]
