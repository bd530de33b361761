"""Cells: all runs of one workload under one arm, what a comparison has a row for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.evidence.arms import arm_names, arm_of, peer_of
from trainer.evidence.runs import Run
from trainer.evidence.workloads import workload_names, workload_of


@dataclass(kw_only=True, slots=True)
class Cell:
    """All runs of one workload under one arm: cold and warm starts, repeats and seeds."""

    workload: str
    """Short name that tells the workload from the others given: the task, and the settings that differ."""
    arm: str
    """The strategies, with those of their parameters that are not defaults: ``whole (mode=reduce-overhead)``."""
    cold: list[Run] = field(default_factory=list)
    """Finished runs that started with empty compile caches, or at least compiled every graph anew."""
    warm: list[Run] = field(default_factory=list)
    """Finished runs that found all they compiled in the caches."""
    others: list[Run] = field(default_factory=list)
    """Finished runs of which the state of the caches is not known; eager's, where caches were not controlled."""
    failed: list[Run] = field(default_factory=list)
    """Runs that did not finish: failed, interrupted, still running or killed."""

    @property
    def finished(self) -> list[Run]:
        """All runs with figures to compare."""
        return [*self.cold, *self.warm, *self.others]

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [*self.finished, *self.failed]

    @property
    def label(self) -> str:
        """The strategies' names, without parameters."""
        return self.runs[0].record.label

    @property
    def compiles(self) -> bool:
        """Whether anything was compiled in a run that finished, so that the state of compile caches matters."""
        return any(run.record.compile_seconds is not None for run in self.finished)

    @property
    def command(self) -> str:
        """The command of the first run."""
        record = self.runs[0].record
        program = "trainer" if peer_of(record) is None else "scripts.peers.cell"
        return shlex.join(["python", "-m", program, *record.command])


def group(runs: Sequence[Run]) -> list[Cell]:
    """The cells of ``runs``: workloads in the order in which their first runs come, arms of each likewise."""
    workloads: dict[tuple[str, ...], dict[tuple[str, ...], list[Run]]] = {}
    for run in runs:
        arms = workloads.setdefault(workload_of(run.record), {})
        arms.setdefault(arm_of(run.record), []).append(run)
    firsts = [next(iter(arms.values()))[0].record for arms in workloads.values()]
    cells: list[Cell] = []
    for workload, arms in zip(workload_names(firsts), workloads.values(), strict=True):
        names = arm_names([members[0].record for members in arms.values()])
        for arm, members in zip(names, arms.values(), strict=True):
            cell = Cell(workload=workload, arm=arm)
            for run in members:
                _place(cell, run)
            cells.append(cell)
    return cells


def _place(cell: Cell, run: Run) -> None:
    record = run.record
    if record.status != "finished":
        cell.failed.append(run)
        return
    # Where nobody saw to the caches, what the compiler found in them is the next best thing to know.
    match record.start or record.cache:
        case "cold":
            cell.cold.append(run)
        case "warm":
            cell.warm.append(run)
        case _:
            cell.others.append(run)
