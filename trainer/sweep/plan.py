"""Plan: the cells of a sweep in the order in which they run, the options ``hydra.launcher.<option>=...``, the ledger.

The ledger is ``sweep.json``: what a sweep planned and how far it got, so that a sweep that was killed continues. A
command with ``sweep=DIR`` starts a sweep in ``DIR``, and continues it when it is given again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from trainer.telemetry.files import build, read_json, write_json
from trainer.telemetry.record import RunRecord

FILE_NAME = "sweep.json"
LOCK_NAME = ".sweep.lock"
SCHEMA = 2
OPTION = "sweep="
SWEEP_DIRECTORY = "hydra.sweep.dir"
"""What the option is to Hydra."""
MAX_NAME = 120
"""Characters of a cell's directory name; file systems take 255 bytes."""
STARTS = (None, "cold", "warm")
"""In the order in which they run."""
COMPILE = re.compile(r"^[+~]*compile\b")
REPEAT = re.compile(r"^[+~]*repeat\b")
CACHES = ("own", "shared")
REFUSED = 2
"""Exit code of a command that was refused before any work."""


@dataclass(kw_only=True, slots=True)
class Entry:
    """One cell as it stands in the ledger: what it is, where it lies and what ran it."""

    number: int = -1
    overrides: list[str]
    """All that its command line says."""
    round: int | None = None
    copy: int = 0
    """Cells with the same overrides and round before this one."""
    start: str | None = None
    """``cold`` or ``warm``, see ``Config.repeat``; None where a store or the machine's caches decide."""
    directory: str = ""
    """Relative to the sweep's. How the cell ended stands in the record there."""
    code: str = ""
    """Version of the code that ran it; empty before it was started."""

    def is_same(self, other: Entry) -> bool:
        """Whether both are one cell of a sweep that continues."""
        return (self.overrides, self.round, self.copy) == (other.overrides, other.round, other.copy)


@dataclass(kw_only=True, slots=True)
class PlannedCell:
    """One process of a sweep."""

    entry: Entry
    arm: tuple[str, ...]
    """Those of its overrides that choose strategies and their options."""
    job: int
    """Index of the sweeper's job that it belongs to; arms and rounds make several cells of one job."""
    record: RunRecord
    """As far as the configuration tells it, until the cell has ended: then as its process left it, if it left one."""
    exit_code: int | None = None
    """Of its process, negative when a signal killed it; None until it has ended."""
    chosen: list[str] = field(default_factory=list)
    """What sets it apart from the other cells."""
    directory: Path = field(default_factory=Path)
    caches: Path | None = None
    """Compile caches of its own, or shared with the other cell of its pair; None for the machine's."""
    command: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return " ".join(self.chosen) or "one cell"

    @property
    def shared(self) -> tuple[str, ...]:
        """The overrides that a cell has in common with the other arms of its workload and seed."""
        return tuple(each for each in self.entry.overrides if each not in self.arm and not REPEAT.match(each))

    @property
    def pair(self) -> tuple[object, ...]:
        """What a cold cell and the warm one after it have in common, and no other cell."""
        return (self.shared, self.arm, self.entry.round, self.entry.copy)


def quoted(value: object) -> str:
    """A value in quotes, as Hydra's grammar reads it back: backslashes count only before a quote, and are doubled."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), str(value)) + '"'


def with_arms(overrides: Sequence[str], arms: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of each cell that ``arms`` (``whole compile.whole.mode=reduce-overhead``) make of one job, and those of
    them that are the arm's. Raises ValueError when the job names strategies too."""
    if not arms:
        return [(tuple(overrides), tuple(override for override in overrides if COMPILE.match(override)))]
    if named := [override for override in overrides if override.startswith("compile=")]:
        raise ValueError(f"hydra.launcher.arms and {named[0]} both name strategies; leave one of them out")
    chosen = [(f"compile={words[0]}", *words[1:]) for words in map(str.split, arms)]
    return [((*overrides, *arm), arm) for arm in chosen]


def in_order(cells: Sequence[PlannedCell], *, rounds: int) -> list[PlannedCell]:
    """The cells as they run: all arms of a workload and seed before those of the next, so that what changes on a
    machine with time hits them alike; a cold one right before the warm one of its pair; everything once a round.

    Raises ValueError for a warm cell without a cold one.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for cell in cells:
        cell.entry.copy = seen[tuple(cell.entry.overrides)]
        seen[tuple(cell.entry.overrides)] += 1
    cold = {cell.pair for cell in cells if cell.entry.start == "cold"}
    for cell in cells:
        if cell.entry.start == "warm" and cell.pair not in cold:
            what = " ".join((*cell.shared, *cell.arm)) or "this cell"
            raise ValueError(f"repeat='warm' of {what} has no cold cell in this sweep; use repeat=cold,warm")
    workloads = list(dict.fromkeys(cell.shared for cell in cells))
    pairs = list(dict.fromkeys(cell.pair for cell in cells))

    def place(cell: PlannedCell) -> tuple[int, int, int]:
        return workloads.index(cell.shared), pairs.index(cell.pair), STARTS.index(cell.entry.start)

    ordered = sorted(cells, key=place)
    if rounds == 1:
        return ordered
    return [_in_round(cell, number) for number in range(1, rounds + 1) for cell in ordered]


def _in_round(cell: PlannedCell, number: int) -> PlannedCell:
    record = dataclasses.replace(cell.record, round=number)
    return dataclasses.replace(cell, entry=dataclasses.replace(cell.entry, round=number), record=record)


def name_by_difference(cells: Sequence[PlannedCell]) -> None:
    """Set ``chosen`` of each cell: the overrides that not all share (all where there is one kind of cell only) and the
    round."""
    kinds = {tuple(cell.entry.overrides) for cell in cells}
    shared = set() if len(kinds) == 1 else set(cells[0].entry.overrides).intersection(*kinds)
    for cell in cells:
        cell.chosen = [override for override in cell.entry.overrides if override not in shared]
        if cell.entry.round is not None:
            cell.chosen.append(f"round={cell.entry.round}")


def directory_name(chosen: Sequence[str]) -> str:
    """A readable, short file name from overrides: ``compile=[regional,mine]`` becomes ``compile=regional+mine``."""
    text = ",".join(re.sub(r"[\[\]{}'\"]", "", override).replace(",", "+") for override in chosen)
    return re.sub(r"[^\w.=+,-]+", "_", text)[:MAX_NAME] or "run"


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """``hydra.launcher.<option>=...``: which cells there are, and how they start."""

    rounds: int = 1
    """Times that every cell runs, all arms once in each (A B A B); with more than one, the record has its round."""
    arms: list[str] = field(default_factory=list)
    """Values of ``compile=`` with further overrides after blanks, for what a list of values cannot say:
    ``["eager","whole compile.whole.mode=reduce-overhead"]``."""
    caches: str = "own"
    """Compile caches of cells without ``repeat``: ``own`` = empty ones for each, so that none finds what the one before
    it compiled, though a store of ``compile=cached`` stays; ``shared`` = the machine's, as they are: compile times then
    say little, and cells that repeat start sooner."""
    objective: str = "final_loss"
    """The figure of a cell's record that a sweeper of the user's gets: ``total_seconds``, ``useful_tokens_per_second``,
    ..."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        found = [f"rounds={self.rounds} must be at least 1"] if self.rounds < 1 else []
        if self.caches not in CACHES:
            found.append(f"caches={self.caches!r} is not one of {CACHES}")
        if self.objective not in {each.name for each in fields(RunRecord)}:
            found.append(f"objective={self.objective!r} is not a figure of a record")
        if any(not arm.strip() for arm in self.arms):
            found.append(f"arms={self.arms} holds an arm without a value for compile=")
        if found:
            raise ValueError("\n".join(f"hydra.launcher.{complaint}" for complaint in found))


@dataclass(kw_only=True, slots=True)
class Ledger:
    """The contents of ``sweep.json``, written whole at every change."""

    schema: int = SCHEMA
    command: str = ""
    """The shell's line that continues the sweep."""
    cells: list[Entry] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> Ledger | None:
        """Read the sweep of ``directory``; None when there is none. Raises ValueError for a file that is not ours."""
        file = directory / FILE_NAME
        if not file.is_file():
            return None
        try:
            values = read_json(file, "a sweep of ours")
            if values["schema"] != SCHEMA:
                raise ValueError(f"{file}: sweep schema {values['schema']}, this version reads {SCHEMA}")
            ledger = build(cls, values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a sweep of ours ({error})") from error
        for entry in ledger.cells:  # what lies in a cell's folder is moved and removed
            if not (directory / entry.directory).resolve().is_relative_to(directory.resolve()):
                raise ValueError(f"{file}: the folder {entry.directory} of a cell lies outside")
        return ledger

    def save(self, directory: Path) -> None:
        """Write the file so that a reader sees the old one or the new one whole."""
        write_json(directory / FILE_NAME, dataclasses.asdict(self))

    def enter(self, entry: Entry) -> Entry:
        """The entry of this cell from before, or ``entry``, which becomes one."""
        for known in self.cells:
            if known.is_same(entry):
                known.start = entry.start  # another ``hydra.launcher.caches`` changes it
                return known
        self.cells.append(entry)
        return entry


def again(arguments: Sequence[str], directory: Path) -> str:
    """The shell's line that continues the sweep that ``arguments`` have started in ``directory``."""
    given = [word for word in arguments if not word.startswith(f"{SWEEP_DIRECTORY}=")]
    return shlex.join(["python", "-m", "trainer", *given, f"{OPTION}{directory}"])


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Be the only sweep in ``directory``, until the block ends or the process dies; waits for another one.

    Cells inherit the lock: one that outlives its sweep is waited for, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_NAME).open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the sweep or the cell that still runs in {directory}", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
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
    others = [argument for argument in arguments if argument not in (*chosen, "-m", "--multirun")]
    ledger = Ledger.load(directory)
    if others:
        return ["-m", *others, f"{SWEEP_DIRECTORY}={quoted(directory)}"]
    if ledger is None:
        raise ValueError(f"{chosen[-1]}: no {FILE_NAME} in it, and nothing else to run")
    raise ValueError(f"{chosen[-1]}: give its whole command again: {ledger.command}")
