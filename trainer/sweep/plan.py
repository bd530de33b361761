"""Plan: the cells of a sweep, in the order in which they run, and which of them must come one after the other."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.telemetry.record import RunRecord

LONGEST_NAME = 120
"""Characters of a cell's directory name; file systems take 255 bytes."""
STARTS = (None, "cold", "warm")
"""In the order in which they run."""
COMPILE = re.compile(r"^[+~]*compile\b")
REPEAT = re.compile(r"^[+~]*repeat\b")

Key = tuple[tuple[str, ...], int | None, int]
"""What makes a cell the same one when a sweep is gone on with: overrides, round, and how many of its kind came before
it."""


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
    """Compile caches of its own, or shared with its twin; None for the machine's."""
    command: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """The same for the same cell of a sweep that is gone on with."""
        return (self.overrides, self.round, self.copy)

    @property
    def title(self) -> str:
        """Its name for people."""
        return " ".join(self.chosen) or "one cell"

    @property
    def shared(self) -> tuple[str, ...]:
        """The overrides that a cell has in common with the other arms of its workload and seed."""
        return tuple(each for each in self.overrides if each not in self.arm and not REPEAT.match(each))

    @property
    def pair(self) -> tuple[object, ...]:
        """What a cold cell and its warm twin have in common, and no other cell."""
        return (self.shared, self.arm, self.round, self.copy)


def with_arms(overrides: Sequence[str], arms: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of each cell that ``arms`` (``whole compile.whole.mode=reduce-overhead``) make of one job, and those of
    them that are the arm's. Raises ValueError when the job names strategies too."""
    if not arms:
        return [(tuple(overrides), tuple(override for override in overrides if COMPILE.match(override)))]
    if named := [override for override in overrides if override.startswith("compile=")]:
        raise ValueError(f"hydra.launcher.arms and {named[0]} both name strategies; leave one of them out")
    chosen = [(f"compile={words[0]}", *words[1:]) for words in map(str.split, arms)]
    return [((*overrides, *arm), arm) for arm in chosen]


def in_order(cells: Sequence[PlannedCell], *, rounds: int, take_turns: bool) -> list[PlannedCell]:
    """The cells as they run: a cold one right before its warm twin, arms in turns, everything once a round.

    Raises ValueError for a warm cell without a cold twin.
    """
    _count_copies(cells)
    _refuse_lonely(cells)
    workloads = list(dict.fromkeys(cell.shared for cell in cells))
    pairs = list(dict.fromkeys(cell.pair for cell in cells))

    def place(cell: PlannedCell) -> tuple[int, int, int]:
        return (
            workloads.index(cell.shared) if take_turns else 0,
            pairs.index(cell.pair),
            STARTS.index(cell.start),
        )

    ordered = sorted(cells, key=place)
    if rounds == 1:
        return ordered
    return [_in_round(cell, number) for number in range(1, rounds + 1) for cell in ordered]


def lanes(cells: Sequence[PlannedCell], *, take_turns: bool) -> list[list[PlannedCell]]:
    """Groups of cells that must run one after the other, on one device: twins, and arms that take turns."""
    found: dict[tuple[object, ...], list[PlannedCell]] = {}
    for cell in cells:
        key = (cell.shared, cell.round) if take_turns else cell.pair
        found.setdefault(key, []).append(cell)
    return list(found.values())


def name_by_difference(cells: Sequence[PlannedCell], fixed: frozenset[str] = frozenset()) -> None:
    """Set ``chosen`` of each cell: the overrides that not all share (all of them but ``fixed`` where there is one kind
    of cell only) and the round."""
    kinds = {cell.overrides for cell in cells}
    shared = fixed if len(kinds) == 1 or fixed else frozenset(cells[0].overrides).intersection(*kinds)
    for cell in cells:
        cell.chosen = [override for override in cell.overrides if override not in shared]
        if cell.round is not None:
            cell.chosen.append(f"round={cell.round}")


def directory_name(chosen: Sequence[str]) -> str:
    """A readable, short file name from overrides: ``compile=[regional,mine]`` becomes ``compile=regional+mine``."""
    text = ",".join(re.sub(r"[\[\]{}'\"]", "", override).replace(",", "+") for override in chosen)
    return re.sub(r"[^\w.=+,-]+", "_", text)[:LONGEST_NAME] or "run"


def _count_copies(cells: Sequence[PlannedCell]) -> None:
    seen: Counter[tuple[str, ...]] = Counter()
    for cell in cells:
        cell.copy = seen[cell.overrides]
        seen[cell.overrides] += 1


def _refuse_lonely(cells: Sequence[PlannedCell]) -> None:
    cold = {cell.pair for cell in cells if cell.start == "cold"}
    for cell in cells:
        if cell.start == "warm" and cell.pair not in cold:
            what = " ".join((*cell.shared, *cell.arm)) or "this cell"
            raise ValueError(f"repeat='warm' of {what} has no cold twin in this sweep; use repeat=cold,warm")


def _in_round(cell: PlannedCell, number: int) -> PlannedCell:
    return dataclasses.replace(cell, round=number, described=dataclasses.replace(cell.described, round=number))
