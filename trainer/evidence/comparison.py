"""Comparison: the arms of each workload side by side, with ratios to the baseline, break-even and a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.evidence import likeness
from trainer.evidence.arms import PEER
from trainer.evidence.cells import Cell, group
from trainer.evidence.crossings import Crossing, envelope
from trainer.evidence.flags import BUSY, THIN, UNLIKE
from trainer.evidence.rows import Row, rows_of
from trainer.evidence.runs import Run
from trainer.evidence.statistics import FASTER
from trainer.evidence.verdicts import verdict

__all__ = ["AT_STEPS", "Row", "WorkloadComparison", "compare"]

AT_STEPS = (500, 2000, 20000)
"""Numbers of steps (batches, in inference) for which total times are told."""


@dataclass(kw_only=True, slots=True)
class WorkloadComparison:
    """All arms of one workload."""

    workload: str
    task: str
    run: str
    """``train`` or ``inference``."""
    device: str
    """All that there are, joined by `` / `` (then they are in ``unlike``); ``n/a`` when no record has one."""
    versions: dict[str, str]
    """Of torch, triton and CUDA, likewise."""
    baseline: str
    """Arm that the others are compared with."""
    rows: list[Row]
    """The baseline first."""
    unlike: list[str]
    """What should be the same in all runs and is not, a line each: ``torch: 2.11.0 (2 runs), 2.15.0 (3 runs)``."""
    notes: list[str] = field(default_factory=list)
    """Differences that need not matter: commit, number of steps; and what is missing for a comparison."""
    crossings: list[Crossing] = field(default_factory=list)
    """Which arm needs the least total time from which step on: cold starts first, then warm ones, each from step 0.
    Of the arms that are shown to be faster, and the baseline."""
    verdict: str = ""
    """One plain sentence: which arm to use, for how many steps."""

    @property
    def unit(self) -> str:
        """What is counted: ``steps`` or ``batches``."""
        return "batches" if self.run == "inference" else "steps"

    @property
    def baseline_row(self) -> Row | None:
        """The row that the others are compared with; None when no such run finished."""
        first = self.rows[0]
        return first if first.cell.finished and first.ratio is None and _is(first.cell, self.baseline) else None


def compare(
    runs: Sequence[Run], *, baseline: str = "eager", at_steps: Sequence[int] = AT_STEPS
) -> list[WorkloadComparison]:
    """Compare the arms of each workload in ``runs``, in the order in which they come.

    Args:
        runs: Of any workloads; a workload is compared with itself only.
        baseline: Name of an arm, or of a label that one arm alone has.
        at_steps: Numbers of steps to tell total times for; the largest is where the verdict stops looking.

    Raises ValueError when there are no runs, a number of steps is below 1, or the baseline asked for is none or several
    of the arms. ``eager`` alone may be missing: ratios are then None.
    """
    if not runs:
        raise ValueError("no runs to compare")
    if not at_steps or min(at_steps) < 1:
        raise ValueError(f"steps={min(at_steps, default=None)} must be at least 1")
    workloads: dict[str, list[Cell]] = {}
    for cell in group(runs):
        workloads.setdefault(cell.workload, []).append(cell)
    if baseline != "eager" and not any(_is(cell, baseline) for cells in workloads.values() for cell in cells):
        arms = dict.fromkeys(cell.arm for cells in workloads.values() for cell in cells)
        raise ValueError(f"baseline={baseline!r} is not one of the arms: {', '.join(arms)}")
    return [_compared(name, cells, baseline, at_steps) for name, cells in workloads.items()]


def _compared(workload: str, cells: list[Cell], baseline: str, at_steps: Sequence[int]) -> WorkloadComparison:
    base = _baseline(cells, baseline)
    everything = [run for cell in cells for run in cell.runs]
    measured = [run for cell in cells for run in cell.finished] or everything
    first = everything[0].record
    rows = rows_of(cells, base, at_steps)
    found = WorkloadComparison(
        workload=workload,
        task=first.task,
        run=first.run,
        device=_joined([run.record.device for run in measured]) or "n/a",
        versions={
            name: joined
            for name in likeness.DECISIVE_VERSIONS
            if (joined := _joined([run.record.versions.get(name) for run in measured]))
        },
        baseline=baseline if base is None else base.arm,
        rows=rows,
        unlike=likeness.unlike(measured),
        notes=likeness.notes(measured),
    )
    if found.baseline_row is None:
        found.verdict = _without(baseline, base, cells)
    else:
        found.crossings = _crossings(found)
        others = [row for row in rows[1:] if row.ratio is not None]
        busy = [flag for row in (rows[0], *others) for flag in row.flags if flag.startswith(BUSY)]
        found.verdict = (
            f"no verdict, {busy[0]}"
            if busy and others
            else verdict(
                found.crossings,
                baseline=found.baseline,
                arms=[row.cell.arm for row in others],
                shown=sum(row.ratio is not None and row.ratio.shown for row in others),
                single=all(row.ratio is not None and row.ratio.low is None for row in others),
                horizon=max(at_steps),
                unit=found.unit,
            )
            + _caveat(found)
        )
    return found


def _crossings(found: WorkloadComparison) -> list[Crossing]:
    base = found.rows[0]
    candidates = [base, *(row for row in found.rows[1:] if _can_win(row))]
    crossings: list[Crossing] = []
    if any(row.cost is not None for row in found.rows[1:]) and base.cost is not None:
        costs = {row.cell.arm: row.cost for row in candidates if row.cost is not None}
        crossings += envelope(costs, base.cost, "cold")
    if any(row.cost_warm is not None for row in found.rows[1:]) and base.cost_warm is not None:
        costs = {row.cell.arm: row.cost_warm for row in candidates if row.cost_warm is not None}
        crossings += envelope(costs, base.cost_warm, "warm")
    return crossings


def _caveat(found: WorkloadComparison) -> str:
    """What weakens the verdict: thin figures of the arms that it names, or runs that are unlike."""
    named = {found.baseline, *(crossing.arm for crossing in found.crossings)}
    flags = [flag for row in found.rows if row.cell.arm in named for flag in row.flags]
    told = [word for word in (THIN, UNLIKE) if any(flag.startswith(word) for flag in flags)]
    return {(): "", (THIN,): " (on thin figures)", (UNLIKE,): " (of runs that are unlike)"}.get(
        tuple(told), " (on thin figures, of runs that are unlike)"
    )


def _can_win(row: Row) -> bool:
    """Whether the row is shown to be faster, by what its arm is made of and not by what it fell back to."""
    if row.ratio is None or row.ratio.verdict != FASTER:
        return False
    return not any(run.record.ended_in_eager for run in row.cell.finished)


def _baseline(cells: Sequence[Cell], name: str) -> Cell | None:
    named = [cell for cell in cells if cell.arm == name] or [cell for cell in cells if cell.label == name]
    if len(named) > 1:
        raise ValueError(f"baseline={name!r} is several arms: {', '.join(cell.arm for cell in named)}")
    return named[0] if named else None


def _is(cell: Cell, name: str) -> bool:
    return name in (cell.arm, cell.label)


def _without(name: str, base: Cell | None, cells: Sequence[Cell]) -> str:
    """What to say when there is nothing to compare with, and how to get it."""
    if base is not None:
        return f"no {name} run of this workload has finished, so there is nothing to compare with"
    command = cells[0].runs[0].record.command
    words = [word for word in command if not word.lstrip("+~").startswith(("compile", f"{PEER}="))]
    how = f": {shlex.join(['python', '-m', 'trainer', *words, 'compile=eager'])}" if name == "eager" else ""
    return f"there is no {name} run of this workload to compare with{how}"


def _joined(values: Sequence[str | None]) -> str:
    return " / ".join(dict.fromkeys(value for value in values if value is not None))
