"""Lines of total time over the number of steps, and how much of them to show: what the crossing picture draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.evidence.comparison import WorkloadComparison

MOST_ARMS = 10
"""Arms that are drawn; of more than these, the slowest are left to the table."""
FEWEST_STEPS, MOST_STEPS = 10, 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """Total seconds of one arm from one start: ``fixed_seconds + step_seconds * steps``."""

    arm: str
    start: str
    """``cold`` or ``warm``."""
    fixed_seconds: float
    step_seconds: float
    shown: bool = True
    """Whether a difference from the baseline is; the baseline's own line is sure as well."""

    def at(self, steps: float) -> float:
        """Total seconds at ``steps``."""
        return self.fixed_seconds + self.step_seconds * steps

    def meets(self, other: Line) -> float | None:
        """Steps after which both have taken the same time; None for equally fast ones."""
        gained = other.step_seconds - self.step_seconds
        return (self.fixed_seconds - other.fixed_seconds) / gained if gained else None


def lines(comparison: WorkloadComparison) -> list[Line]:
    """A line for each arm and start whose total time is known."""
    found: list[Line] = []
    for row in comparison.rows:
        drawn: set[tuple[float, float]] = set()
        for start, cost in (("cold", row.cost), ("warm", row.cost_warm)):
            fixed = row.total_at(0, baseline=comparison.baseline_row, warm=start == "warm")
            if cost is None or fixed is None or (fixed, cost.step_seconds) in drawn:
                continue  # what compiles nothing starts the same either way: one line
            drawn.add((fixed, cost.step_seconds))
            shown = row.ratio is None or row.ratio.shown
            found.append(Line(row.cell.arm, start, fixed, cost.step_seconds, shown))
    return found


def starts_of(comparison: WorkloadComparison) -> list[str]:
    """Starts whose least time has a band of its own: both, unless they say the same."""
    best = {
        start: [(one.from_steps, one.arm) for one in comparison.crossings if one.start == start]
        for start in ("cold", "warm")
    }
    return [start for start in best if best[start] and (start == "cold" or best["warm"] != best["cold"])]


def drawn_arms(comparison: WorkloadComparison, every: Sequence[Line]) -> list[str]:
    """Arms to draw, in the order of the table: the baseline, those that are best somewhere, then the fastest."""
    needed = {comparison.baseline, *(one.arm for one in comparison.crossings)}
    known = {line.arm: line.step_seconds for line in every}
    fastest = sorted(known, key=lambda arm: (arm not in needed, known[arm]))[:MOST_ARMS]
    return [row.cell.arm for row in comparison.rows if row.cell.arm in fastest]


def limits(comparison: WorkloadComparison, every: Sequence[Line]) -> tuple[float, float]:
    """Steps from which to which the pictures go: a good way beyond all that happens."""
    marks = [float(one.from_steps) for one in comparison.crossings if one.from_steps > 0]
    for row in comparison.rows:
        marks += [steps for steps in (row.break_even_steps, row.break_even_steps_warm) if steps]
        marks += [float(steps) for steps in row.total_seconds]
    told = [steps for steps in marks if math.isfinite(steps) and steps > 0] or [1000.0]
    low = 10 ** math.floor(math.log10(max(FEWEST_STEPS, min(told) / 4)))
    high = 10 ** math.ceil(math.log10(min(MOST_STEPS, max(told) * 2)))
    return float(low), float(max(high, 100 * low))
