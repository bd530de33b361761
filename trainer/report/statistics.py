"""Statistics of repeated runs: estimates with their range, ratios with a 95% interval and what it shows; and what total
time makes of them: when an arm breaks even, which one is best from which step on.

Times are compared by their logarithms, so that a ratio and its inverse are judged alike. The interval of a ratio is
Student's t over **pairs** from three on, and Welch's t over **runs** otherwise, which for two runs is the narrower of
the two. A bootstrap over three or four runs would promise 95% and hold far less. docs/comparing.md says when a
difference is shown ("How a difference is shown"), and what total time is made of ("The figures"). The interval alone
called an arm different from itself in 66% of simulated comparisons on a machine that slows down evenly; with the second
condition it is 0.7%, and 1.2 to 4.9% under five other kinds of noise (2026-11-22).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Arm = TypeVar("Arm", bound=Hashable)

FASTER, SLOWER, NOT_SHOWN = "faster", "slower", "no difference shown"
MIN_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over repeated runs."""

    values: tuple[float, ...]
    """Of each run; at least one."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float | None:
        """The smallest, as ``high`` is the largest: a range, which for n runs holds the true median with
        1 - 2 ** (1 - n) confidence. None for one run."""
        return min(self.values) if len(self.values) > 1 else None

    @property
    def high(self) -> float | None:
        return max(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster than the baseline an arm is: the baseline's seconds over the arm's."""

    value: float
    low: float | None
    """95% interval; None where a side has one run."""
    high: float | None
    pairs: int
    """Pairs that the ratio is taken over; 0 when it is not taken over pairs."""
    verdict: str
    """``faster``, ``slower`` or ``no difference shown`` (the interval holds 1, there is none, or the arms are closer
    than their own runs are)."""

    @property
    def shown(self) -> bool:
        """Whether a difference is shown: what claims a gain or a loss asks this."""
        return self.verdict != NOT_SHOWN


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one run that a ratio is taken of."""

    seconds: float
    """Mean seconds of a step, or of the same amount of work."""
    key: Hashable
    """What a run of the other arm has to share to be its pair."""


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """The estimate over the values that are there; None without any."""
    there = tuple(value for value in values if value is not None)
    return Estimate(there) if there else None


def ratio(arm: Sequence[Sample], baseline: Sequence[Sample], *, alike: bool = True) -> Ratio | None:
    """How many times faster ``arm`` is than ``baseline``; None when a side has no run.

    Pairs that are not ``alike`` differ from each other: how far one side's samples spread, their ratios say alone.
    """
    if not arm or not baseline:
        return None
    ours, theirs = ([math.log(sample.seconds) for sample in side] for side in (arm, baseline))
    if len(ours) < 2 or len(theirs) < 2:
        value = math.exp(statistics.fmean(theirs) - statistics.fmean(ours))
        return Ratio(value, None, None, 0, NOT_SHOWN)
    spread = max(statistics.stdev(ours), statistics.stdev(theirs))
    others = {sample.key: sample.seconds for sample in baseline}
    # A key that several runs of a side share makes no pair.
    alone = len(others) == len(baseline) and len({sample.key for sample in arm}) == len(arm)
    logs = [math.log(others[sample.key] / sample.seconds) for sample in arm if alone and sample.key in others]
    if len(logs) >= MIN_PAIRS:
        half_width = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        spread = spread if alike else statistics.stdev(logs) / math.sqrt(2)  # a ratio holds the noise of both sides
        return _judged(statistics.fmean(logs), half_width, spread, pairs=len(logs))
    # Welch's interval of the difference of two means.
    shares = [(statistics.variance(side) / len(side), len(side) - 1) for side in (ours, theirs)]
    total, half_width = sum(share for share, _ in shares), 0.0
    if total:
        degrees = total**2 / sum(share**2 / freedom for share, freedom in shares)
        half_width = t_quantile(degrees) * math.sqrt(total)
    return _judged(statistics.fmean(theirs) - statistics.fmean(ours), half_width, spread)


def t_quantile(degrees: float) -> float:
    """The 97.5% quantile of Student's t; fractions of a degree of freedom are rounded down, to the wider interval.

    A table and an expansion are ten lines; ``scipy.stats.t.ppf`` would be a dependency that takes a second to import.
    """
    whole = max(1, math.floor(degrees))
    if whole <= len(_T):
        return _T[whole - 1]
    # Cornish-Fisher expansion around the normal quantile; beyond the table it is right to four digits.
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * whole)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * whole**3)
    )


_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788)
"""97.5% quantiles of Student's t for 1, 2, ... degrees of freedom."""


def _judged(logarithm: float, half_width: float, spread: float, *, pairs: int = 0) -> Ratio:
    value, low, high = (math.exp(logarithm + sign * half_width) for sign in (0, -1, 1))
    verdict = FASTER if low > 1 else SLOWER if high < 1 else NOT_SHOWN
    return Ratio(value, low, high, pairs, verdict if abs(logarithm) > spread else NOT_SHOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    step_seconds: float
    """Mean of a steady step."""
    warmup_seconds: float
    warmup_steps: float = 0.0
    compile_seconds: float = 0.0
    preparation_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Crossing(Generic[Arm]):
    """From ``from_steps`` steps on an arm needs the least total time, up to the next one."""

    from_steps: int
    """0 for the arm that is best for the shortest runs."""
    arm: Arm


def overhead_seconds(cost: Cost, baseline: Cost | None) -> float:
    """What warm-up and compiling take beyond steady steps; the baseline's own warm-up is what any arm has to do."""
    beyond = max(0.0, cost.warmup_seconds - cost.warmup_steps * cost.step_seconds)
    own = cost.preparation_seconds + max(beyond, cost.compile_seconds)
    if baseline is None or baseline is cost:
        return own
    without_compiling = overhead_seconds(baseline, None) - baseline.compile_seconds - baseline.preparation_seconds
    return max(own, without_compiling + cost.compile_seconds + cost.preparation_seconds)


def break_even_steps(cost: Cost, baseline: Cost) -> float:
    """Steps after which an arm has caught up with the baseline; infinite when it is not the faster of the two."""
    gained = baseline.step_seconds - cost.step_seconds
    extra = overhead_seconds(cost, baseline) - overhead_seconds(baseline, None)
    return max(0.0, extra / gained) if gained > 0 else math.inf


def envelope(costs: Mapping[Arm, Cost], baseline: Cost | None) -> list[Crossing[Arm]]:
    """The arms of least total time over the number of steps, from step 0 on; the first named wins a tie."""
    lines = {arm: (overhead_seconds(cost, baseline), cost.step_seconds) for arm, cost in costs.items()}
    best = min(lines, key=lambda arm: lines[arm][0])
    steps, found = 0.0, [Crossing(0, best)]
    while True:
        overhead, seconds = lines[best]
        meets = {
            arm: max(steps, (other_overhead - overhead) / (seconds - other_seconds))
            for arm, (other_overhead, other_seconds) in lines.items()
            if other_seconds < seconds
        }
        if not meets:
            return found
        # Where several meet in one point, the one that is fastest after it.
        best = min(meets, key=lambda arm: (meets[arm], lines[arm][1]))
        steps = meets[best]
        if math.ceil(steps) == found[-1].from_steps:
            found.pop()
        found.append(Crossing(math.ceil(steps), best))


def best_at(crossings: Sequence[Crossing[Arm]], steps: float) -> Arm:
    """The arm of least total time for so many steps."""
    return next(one.arm for one in reversed(crossings) if one.from_steps <= steps)


def rounded(steps: float) -> str:
    """A number of steps to two digits: ``1,200``."""
    if steps < 100:
        return f"{math.ceil(steps):,}"
    unit = 10 ** (math.floor(math.log10(steps)) - 1)
    return f"{round(steps / unit) * unit:,}"
