"""Total time over the number of steps: what an arm costs, when it breaks even, which arm is best from which step on,
and that as one plain sentence.

    total(N) = start + overhead + N x step

The overhead is what warm-up takes beyond as many steady steps. What compiling cost is the larger of the extra overhead
and the time in the compiler, which includes validation's graphs; and what getting the compiler ready took from the
setup. In inference a step is a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an arm takes."""

    step_seconds: float
    """Mean of a steady step."""
    warmup_seconds: float
    warmup_steps: float = 0.0
    compile_seconds: float = 0.0
    preparation_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """From ``from_steps`` steps on (batches, in inference) an arm needs the least total time, up to the next one."""

    from_steps: int
    """0 for the arm that is best for the shortest runs."""
    arm: str
    start: str
    """``cold`` or ``warm``: of all arms, which compile caches they start with."""


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


def envelope(costs: Mapping[str, Cost], baseline: Cost | None, start: str) -> list[Crossing]:
    """The arms of least total time over the number of steps, from step 0 on; the first named wins a tie."""
    lines = {arm: (overhead_seconds(cost, baseline), cost.step_seconds) for arm, cost in costs.items()}
    if not lines:
        return []
    best = min(lines, key=lambda arm: lines[arm][0])
    steps, found = 0.0, [Crossing(0, best, start)]
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
        found.append(Crossing(math.ceil(steps), best, start))


def verdict(
    crossings: Sequence[Crossing], *, baseline: str, arms: int, shown: int, single: bool, horizon: int, unit: str
) -> str:
    """The sentence for a workload that has its baseline.

    Args:
        crossings: Of cold and of warm starts.
        baseline: Name of the baseline's arm.
        arms: How many other arms have figures.
        shown: How many of them were shown to differ from the baseline.
        single: Whether no arm can be judged, because it or the baseline has one run.
        horizon: Steps beyond which an advantage does not count.
        unit: ``steps`` or ``batches``.
    """
    if not arms:
        return f"nothing but {baseline} was measured, so there is nothing to compare it with"
    if not shown and single:
        return f"single runs show no difference from {baseline}; repeat with hydra.launcher.rounds=3"
    if not shown:
        return f"no difference from {baseline} is shown; more rounds or longer runs may show one"
    cold, warm = (
        _sentence([crossing for crossing in crossings if crossing.start == start], baseline, horizon, unit)
        for start in ("cold", "warm")
    )
    if not cold and not warm:
        return f"steady steps differ from {baseline}'s; without what warming up takes there is no telling when it pays"
    return "; ".join([*([cold] if cold else []), *([f"with warm caches: {warm}"] if warm not in ("", cold) else [])])


def _sentence(crossings: Sequence[Crossing], baseline: str, horizon: int, unit: str) -> str:
    if not crossings:
        return ""
    within = [crossing for crossing in crossings if crossing.from_steps <= horizon]
    later = [crossing for crossing in crossings if crossing.from_steps > horizon]
    beyond = f" ({later[0].arm} from {rounded(later[0].from_steps)} on)" if later else ""
    if len(within) == 1:
        only = within[0].arm
        if only == baseline:
            return f"no strategy tried is shown to beat {baseline} within {horizon:,} {unit}{beyond}"
        return f"use {only} for any number of {unit}{beyond}"
    words = [f"for fewer than {rounded(within[1].from_steps)} {unit} use {within[0].arm}"]
    for crossing, following in itertools.pairwise(within[1:]):
        words.append(f"from {rounded(crossing.from_steps)} to {rounded(following.from_steps)} {crossing.arm}")
    return "; ".join([*words, f"above, {within[-1].arm}{beyond}"])


def rounded(steps: float) -> str:
    """A number of steps to two digits: ``1,200``."""
    if steps < 100:
        return f"{math.ceil(steps):,}"
    unit = 10 ** (math.floor(math.log10(steps)) - 1)
    return f"{round(steps / unit) * unit:,}"
