"""Statistics of repeated runs: estimates with their range, ratios with a 95% interval and what it shows.

Times are compared by their logarithms, so that a ratio and its inverse are judged alike. The interval of a ratio is

- over **pairs** (runs of both arms with the same seed, round and start) from three on: Student's t over their ratios;
- over **runs** otherwise (at least two a side): Welch's t, which for two runs is the narrower of the two. A bootstrap
  over three or four runs would promise 95% and hold far less;
- absent where a side has one run: its steps do not show what differs from run to run.

A difference is shown where the interval leaves out 1 **and** the ratio is further from 1 than the runs of one arm are
from each other (their standard deviation, the larger of the two arms'). The second keeps out what an interval cannot
see: arms of a round run one after the other, so that on a machine that slows down the later one always looks slower.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FASTER, SLOWER, NOT_SHOWN = "faster", "slower", "no difference shown"
MIN_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over repeated runs."""

    median: float
    low: float | None
    """The smallest and the largest: a range, which for n runs holds the true median with 1 - 2 ** (1 - n) confidence.
    None for one run."""
    high: float | None
    count: int
    """Runs."""
    values: tuple[float, ...]
    """Of each run."""


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
    basis: str
    """What the interval is made of: ``pairs``, ``runs`` or ``none``."""

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
    if not there:
        return None
    low, high = (min(there), max(there)) if len(there) > 1 else (None, None)
    return Estimate(statistics.median(there), low, high, len(there), there)


def ratio(arm: Sequence[Sample], baseline: Sequence[Sample]) -> Ratio | None:
    """How many times faster ``arm`` is than ``baseline``; None when a side has no run."""
    if not arm or not baseline:
        return None
    ours, theirs = ([math.log(sample.seconds) for sample in side] for side in (arm, baseline))
    if len(ours) < 2 or len(theirs) < 2:
        value = math.exp(statistics.fmean(theirs) - statistics.fmean(ours))
        return Ratio(value, None, None, 0, NOT_SHOWN, "none")
    spread = max(statistics.stdev(ours), statistics.stdev(theirs))
    pairs = _pairs(arm, baseline)
    if len(pairs) >= MIN_PAIRS:
        logs = [math.log(other.seconds / one.seconds) for one, other in pairs]
        half_width = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return _judged(statistics.fmean(logs), half_width, spread, "pairs", pairs=len(pairs))
    return _judged(statistics.fmean(theirs) - statistics.fmean(ours), _welch(ours, theirs), spread, "runs")


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


def _pairs(arm: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Runs of both arms that share a key; none when a key belongs to several runs."""
    for side in (arm, baseline):
        if max(Counter(sample.key for sample in side).values()) > 1:
            return []
    others = {sample.key: sample for sample in baseline}
    return [(sample, others[sample.key]) for sample in arm if sample.key in others]


def _welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Half the width of Welch's 95% interval of the difference of two means."""
    shares = [(statistics.variance(side) / len(side), len(side) - 1) for side in (first, second)]
    total = sum(share for share, _ in shares)
    if total == 0:
        return 0.0
    degrees = total**2 / sum(share**2 / freedom for share, freedom in shares)
    return t_quantile(degrees) * math.sqrt(total)


def _judged(logarithm: float, half_width: float, spread: float, basis: str, *, pairs: int = 0) -> Ratio:
    value, low, high = (math.exp(logarithm + sign * half_width) for sign in (0, -1, 1))
    verdict = FASTER if low > 1 else SLOWER if high < 1 else NOT_SHOWN
    return Ratio(value, low, high, pairs, verdict if abs(logarithm) > spread else NOT_SHOWN, basis)
