"""Plan: the cells of a sweep in the order in which they run, and the options ``hydra.launcher.<option>=...``.

A command with ``sweep=DIR`` starts a sweep in ``DIR`` or continues it: the records there say which cells have finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path

from trainer.advice import program
from trainer.telemetry.record import FILE_NAME as RECORD_NAME
from trainer.telemetry.record import RunRecord

LOCK_NAME = ".sweep.lock"
OPTION = "sweep="
RESUME = "resume="
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
class PlannedCell:
    """One process of a sweep."""

    overrides: tuple[str, ...]
    """As the sweeper and ``hydra.launcher.arms`` give them."""
    arm: tuple[str, ...]
    """Those of them that choose strategies and their options."""
    words: Sequence[str] = ()
    """What its command line says of the run: flags of the sweep, overrides, how it starts. Its record has them too."""
    job: int
    """Index of the sweeper's job that it belongs to; arms and rounds make several cells of one job."""
    record: RunRecord
    """As far as the configuration tells it, with its start and round, until the cell has ended: then as its process
    left it, if it left one."""
    exit_code: int | None = None
    """Of its process, negative when a signal killed it; None until it has ended."""
    chosen: list[str] = field(default_factory=list)
    """What sets it apart from the other cells."""
    directory: Path = field(default_factory=Path)
    caches: Path | None = None
    """Compile caches of its own, or shared with the other cell of its pair; None for the machine's."""
    command: list[str] = field(default_factory=list)
    folder: Path | None = None
    """Working directory of its process; None for that of this one."""
    variables: dict[str, str] = field(default_factory=dict)
    """Further ones of its process's environment."""

    @property
    def title(self) -> str:
        return " ".join(self.chosen) or "one cell"

    def outcome(self, seconds: float) -> str:
        """How it ended after ``seconds``, in a line."""
        record = self.record
        speed = f" · {record.steady_steps_per_second:.2f} steps/s" if record.steady_steps_per_second else ""
        reason = f" · {record.reason.splitlines()[0]}" if self.exit_code != 0 and record.reason else ""
        return f"{record.status}{speed} · {timedelta(seconds=round(seconds))}{reason}"

    @property
    def shared(self) -> tuple[str, ...]:
        """The overrides that a cell has in common with the other arms of its workload and seed."""
        return tuple(each for each in self.overrides if each not in self.arm and not REPEAT.match(each))

    @property
    def pair(self) -> tuple[object, ...]:
        """What a cold cell and the warm one after it have in common, and no other cell."""
        return (self.shared, self.arm, self.record.round)


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
    cold = {cell.pair for cell in cells if cell.record.start == "cold"}
    for cell in cells:
        if cell.record.start == "warm" and cell.pair not in cold:
            what = " ".join((*cell.shared, *cell.arm)) or "this cell"
            raise ValueError(f"repeat='warm' of {what} has no cold cell in this sweep; use repeat=cold,warm")
    workloads = list(dict.fromkeys(cell.shared for cell in cells))
    pairs = list(dict.fromkeys(cell.pair for cell in cells))

    def place(cell: PlannedCell) -> tuple[int, int, int]:
        return workloads.index(cell.shared), pairs.index(cell.pair), STARTS.index(cell.record.start)

    ordered = sorted(cells, key=place)
    if rounds == 1:
        return ordered
    return [
        dataclasses.replace(cell, record=dataclasses.replace(cell.record, round=number))
        for number in range(1, rounds + 1)
        for cell in ordered
    ]


def name_by_difference(cells: Sequence[PlannedCell]) -> None:
    """Set ``chosen`` of each cell: the overrides that not all share (of a single kind of cell, all), and the round."""
    kinds = {cell.overrides for cell in cells}
    shared = set() if len(kinds) == 1 else set(cells[0].overrides).intersection(*kinds)
    for cell in cells:
        cell.chosen = [override for override in cell.overrides if override not in shared]
        if cell.record.round is not None:
            cell.chosen.append(f"round={cell.record.round}")


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
    """The figure of a cell's record that a sweeper of the user's gets: ``total_seconds``, ``samples_per_second`` ..."""

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


def recorded(directory: Path) -> dict[tuple[object, ...], list[Path]]:
    """Folders of the cells that have left a record in the sweep's ``directory``, by their words and round."""
    found: dict[tuple[object, ...], list[Path]] = {}
    for file in sorted(directory.rglob(RECORD_NAME)):
        with contextlib.suppress(ValueError):  # not a record of ours
            record = RunRecord.load(file)
            found.setdefault((*record.command, record.round), []).append(file.parent)
    return found


def number_of(folder: Path) -> int:
    """What its name begins with; -1 where that is not a number."""
    found = re.match(r"\d+", folder.name)
    return -1 if found is None else int(found[0])


def again(arguments: Sequence[str], directory: Path) -> str:
    """The shell's line that continues the sweep that ``arguments`` have started in ``directory``."""
    given = [word for word in arguments if not word.startswith(f"{SWEEP_DIRECTORY}=")]
    return shlex.join([*program(), *given, f"{OPTION}{directory}"])


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


def _resumable(argument: str) -> str:
    """A ``resume=PATH`` that exists in quotes: Hydra reads commas and equals signs, which names of cells have, as its
    own."""
    path = argument.removeprefix(RESUME)
    found = path not in ("", argument) and Path(path).expanduser().exists()
    return f"{RESUME}{quoted(path)}" if found else argument


def expanded(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with ``sweep=DIR`` and ``resume=PATH`` as Hydra knows them. Raises ValueError where ``sweep=`` is
    given and nothing else.

    Nothing that a file names is run unseen: it can be anyone's.
    """
    arguments = [_resumable(argument) for argument in arguments]
    chosen = [argument for argument in arguments if argument.startswith(OPTION)]
    if not chosen:
        return arguments
    directory = Path(chosen[-1].removeprefix(OPTION)).expanduser()
    others = [argument for argument in arguments if argument not in (*chosen, "-m", "--multirun")]
    if not others:
        raise ValueError(f"{chosen[-1]}: give the whole command; that of a sweep is in its multirun.yaml")
    return ["-m", *others, f"{SWEEP_DIRECTORY}={quoted(directory)}"]
