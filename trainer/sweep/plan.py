"""Plan: the cells of a sweep in the order in which they run, and the options ``hydra.launcher.<option>=...``."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from trainer.telemetry.record import RunRecord

MAX_NAME = 120
"""Characters of a cell's directory name; file systems take 255 bytes."""
STARTS = (None, "cold", "warm")
"""In the order in which they run."""
COMPILE = re.compile(r"^[+~]*compile\b")
REPEAT = re.compile(r"^[+~]*repeat\b")
CACHES = ("own", "shared")
Key = tuple[tuple[str, ...], int | None, int]
"""What makes a cell the same one when a sweep continues: overrides, round, and how many of its kind came before it."""


@dataclass(kw_only=True, slots=True)
class PlannedCell:
    """One process of a sweep."""

    overrides: tuple[str, ...]
    """All that its command line says."""
    arm: tuple[str, ...]
    """Those of them that choose strategies and their options."""
    job: int
    """Index of the sweeper's job that it belongs to; arms and rounds make several cells of one job."""
    start: str | None
    """``cold`` or ``warm``, see ``Config.repeat``; None where a store or the machine's caches decide."""
    described: RunRecord
    """The record as far as the configuration tells it, for a process that leaves none."""
    round: int | None = None
    copy: int = 0
    """Cells with the same overrides and round before this one."""
    chosen: list[str] = field(default_factory=list)
    """What sets it apart from the other cells."""
    number: int = -1
    directory: Path = field(default_factory=Path)
    caches: Path | None = None
    """Compile caches of its own, or shared with the other cell of its pair; None for the machine's."""
    command: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """The same for the same cell of a sweep that continues."""
        return (self.overrides, self.round, self.copy)

    @property
    def title(self) -> str:
        return " ".join(self.chosen) or "one cell"

    @property
    def shared(self) -> tuple[str, ...]:
        """The overrides that a cell has in common with the other arms of its workload and seed."""
        return tuple(each for each in self.overrides if each not in self.arm and not REPEAT.match(each))

    @property
    def pair(self) -> tuple[object, ...]:
        """What a cold cell and the warm one after it have in common, and no other cell."""
        return (self.shared, self.arm, self.round, self.copy)


def quoted(value: object) -> str:
    """A value in quotes, as Hydra's grammar reads it back: backslashes count only before a quote, and are doubled."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def with_arms(overrides: Sequence[str], arms: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of each cell that ``arms`` (``whole compile.whole.mode=reduce-overhead``) make of one job, and those of
    them that are the arm's. Raises ValueError when the job names strategies too."""
    if not arms:
        return [(tuple(overrides), tuple(override for override in overrides if COMPILE.match(override)))]
    if named := [override for override in overrides if override.startswith("compile=")]:
        raise ValueError(f"hydra.launcher.arms and {named[0]} both name strategies; leave one of them out")
    chosen = [(f"compile={words[0]}", *words[1:]) for words in map(str.split, arms)]
    return [((*overrides, *arm), arm) for arm in chosen]


def in_order(cells: Sequence[PlannedCell], *, rounds: int, interleaved: bool) -> list[PlannedCell]:
    """The cells as they run: a cold one right before the warm one of its pair, arms interleaved, everything once a
    round. Raises ValueError for a warm cell without a cold one."""
    seen: Counter[tuple[str, ...]] = Counter()
    for cell in cells:
        cell.copy = seen[cell.overrides]
        seen[cell.overrides] += 1
    cold = {cell.pair for cell in cells if cell.start == "cold"}
    for cell in cells:
        if cell.start == "warm" and cell.pair not in cold:
            what = " ".join((*cell.shared, *cell.arm)) or "this cell"
            raise ValueError(f"repeat='warm' of {what} has no cold cell in this sweep; use repeat=cold,warm")
    workloads = list(dict.fromkeys(cell.shared for cell in cells))
    pairs = list(dict.fromkeys(cell.pair for cell in cells))

    def place(cell: PlannedCell) -> tuple[int, int, int]:
        return (
            workloads.index(cell.shared) if interleaved else 0,
            pairs.index(cell.pair),
            STARTS.index(cell.start),
        )

    ordered = sorted(cells, key=place)
    if rounds == 1:
        return ordered
    return [_in_round(cell, number) for number in range(1, rounds + 1) for cell in ordered]


def _in_round(cell: PlannedCell, number: int) -> PlannedCell:
    return dataclasses.replace(cell, round=number, described=dataclasses.replace(cell.described, round=number))


def queues(cells: Sequence[PlannedCell], *, interleaved: bool) -> list[list[PlannedCell]]:
    """Groups of cells that must run one after the other, on one device: pairs, and arms that are interleaved."""
    found: dict[tuple[object, ...], list[PlannedCell]] = {}
    for cell in cells:
        found.setdefault((cell.shared, cell.round) if interleaved else cell.pair, []).append(cell)
    return list(found.values())


def name_by_difference(cells: Sequence[PlannedCell]) -> None:
    """Set ``chosen`` of each cell: the overrides that not all share (all where there is one kind of cell only) and the
    round."""
    kinds = {cell.overrides for cell in cells}
    shared = set() if len(kinds) == 1 else set(cells[0].overrides).intersection(*kinds)
    for cell in cells:
        cell.chosen = [override for override in cell.overrides if override not in shared]
        if cell.round is not None:
            cell.chosen.append(f"round={cell.round}")


def directory_name(chosen: Sequence[str]) -> str:
    """A readable, short file name from overrides: ``compile=[regional,mine]`` becomes ``compile=regional+mine``."""
    text = ",".join(re.sub(r"[\[\]{}'\"]", "", override).replace(",", "+") for override in chosen)
    return re.sub(r"[^\w.=+,-]+", "_", text)[:MAX_NAME] or "run"


def value_of(record: RunRecord, figure: str) -> float | None:
    """The record's ``figure``; None where the run has not measured it, and where it is not a number."""
    value = getattr(record, figure)
    return float(value) if isinstance(value, int | float) else None


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """``hydra.launcher.<option>=...``: how cells are started, and on what."""

    rounds: int = 1
    """Times that every cell runs; with more than one, arms are interleaved (A B A B) and the record has its round."""
    arms: list[str] = field(default_factory=list)
    """Values of ``compile=`` with further overrides after blanks, for what a list of values cannot say:
    ``["eager","whole compile.whole.mode=reduce-overhead"]``."""
    parallel: int = 1
    """Cells at once, on a GPU each where there are GPUs; -1 = as many as there are GPUs. One is what timings are fair
    with."""
    gpus_per_cell: int = 1
    """GPUs of each cell, for ``parallel`` above 1."""
    timeout_seconds: float | None = None
    """Longest time of one cell; then it is stopped, killed 30 s later, and given up as failed. Null = no limit."""
    caches: str = "own"
    """Compile caches of cells without ``repeat``: ``own`` = empty ones for each, so that none finds what the one before
    it compiled, though a store of ``compile=cached`` stays; ``shared`` = the machine's, as they are: compile times then
    say little, and cells that repeat start sooner."""
    objective: str = "final_loss"
    """The figure of a cell's record that a sweeper of the user's gets: ``total_seconds``, ``useful_tokens_per_second``,
    ..."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        found = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("rounds", "gpus_per_cell")
            if getattr(self, name) < 1
        ]
        if self.parallel < 1 and self.parallel != -1:
            found.append(f"parallel={self.parallel} must be at least 1, or -1 for the number of GPUs")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            found.append(f"timeout_seconds={self.timeout_seconds} must be above 0, or null for none")
        if self.caches not in CACHES:
            found.append(f"caches={self.caches!r} is not one of {CACHES}")
        if self.objective not in {each.name for each in fields(RunRecord)}:
            found.append(f"objective={self.objective!r} is not a figure of a record")
        if any(not arm.strip() for arm in self.arms):
            found.append(f"arms={self.arms} holds an arm without a value for compile=")
        if found:
            raise ValueError("\n".join(f"hydra.launcher.{complaint}" for complaint in found))

    @property
    def interleaved(self) -> bool:
        """Whether all arms of a workload and seed run before those of the next, so that what changes on a machine with
        time hits them alike. Cells side by side on several devices do so only where rounds are asked for."""
        return self.rounds > 1 or self.parallel == 1
