"""Total time over the number of steps: what an arm costs, when it breaks even, which arm is best from which step on.

    total(N) = start + overhead + N x step

The overhead is what warm-up takes beyond as many steady steps. What compiling cost is the larger of the extra overhead
and the time in the compiler, which includes validation's graphs; and what getting the compiler ready took from the
setup. In inference a step is a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.telemetry.record import RunRecord


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


def step_seconds(record: RunRecord) -> float | None:
    """Mean seconds of a steady step, or of a batch in inference."""
    rate = record.batches_per_second if record.run == "inference" else record.steady_steps_per_second
    return 1 / rate if rate else None


def setup_seconds(record: RunRecord) -> float | None:
    """Building data, module and trainer; getting the compiler ready, which is an arm's own cost, left out."""
    return None if record.setup_seconds is None else record.setup_seconds - (record.preparation_seconds or 0.0)


def cost_of(record: RunRecord) -> Cost | None:
    """What one run took; None when a figure is missing."""
    seconds = step_seconds(record)
    if seconds is None or record.warmup_seconds is None:
        return None
    return Cost(
        step_seconds=seconds,
        warmup_seconds=record.warmup_seconds,
        warmup_steps=record.warmup_steps or 0,
        compile_seconds=record.compile_seconds or 0.0,
        preparation_seconds=record.preparation_seconds or 0.0,
    )


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
        crossing = Crossing(math.ceil(steps), best, start)
        if crossing.from_steps == found[-1].from_steps:
            found[-1] = crossing
        else:
            found.append(crossing)
