"""Verdicts: one plain sentence on which arm to use, with numbers of steps to two digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trainer.evidence.crossings import Crossing


def rounded(steps: float) -> str:
    """A number of steps to two digits: ``1,200``."""
    if steps < 100:
        return f"{math.ceil(steps):,}"
    unit = 10 ** (math.floor(math.log10(steps)) - 1)
    return f"{round(steps / unit) * unit:,}"


def verdict(
    crossings: Sequence[Crossing],
    *,
    baseline: str,
    arms: Sequence[str],
    shown: int,
    single: bool,
    horizon: int,
    unit: str,
) -> str:
    """The sentence for a workload that has its baseline.

    Args:
        crossings: Of cold and of warm starts.
        baseline: Name of the baseline's arm.
        arms: Other arms with figures.
        shown: How many of them were shown to differ from the baseline.
        single: Whether no arm can be judged, because it or the baseline has one run.
        horizon: Steps beyond which an advantage does not count.
        unit: ``steps`` or ``batches``.
    """
    if not arms:
        return f"nothing but {baseline} was measured, so there is nothing to compare it with"
    if not shown:
        if single:
            return f"single runs show no difference from {baseline}; repeat with hydra.launcher.rounds=3"
        return f"no difference from {baseline} is shown; more rounds or longer runs may show one"
    cold = [crossing for crossing in crossings if crossing.start == "cold"]
    warm = [crossing for crossing in crossings if crossing.start == "warm"]
    sentence = _sentence(cold, baseline, horizon, unit) if cold else ""
    told = _sentence(warm, baseline, horizon, unit) if warm else ""
    if not sentence and not told:
        return f"steady steps differ from {baseline}'s; without what warming up takes there is no telling when it pays"
    if not told or told == sentence:
        return sentence or told
    return f"{sentence}; with warm caches: {told}" if sentence else f"with warm caches: {told}"


def _sentence(crossings: Sequence[Crossing], baseline: str, horizon: int, unit: str) -> str:
    near = [crossing for crossing in crossings if crossing.from_steps <= horizon]
    later = [crossing for crossing in crossings if crossing.from_steps > horizon]
    beyond = f" ({later[0].arm} from {rounded(later[0].from_steps)} on)" if later else ""
    if len(near) == 1:
        only = near[0].arm
        if only == baseline:
            return f"no strategy tried is shown to beat {baseline} within {horizon:,} {unit}{beyond}"
        return f"use {only} for any number of {unit}{beyond}"
    words = [f"for fewer than {rounded(near[1].from_steps)} {unit} use {near[0].arm}"]
    for crossing, following in itertools.pairwise(near[1:]):
        words.append(f"from {rounded(crossing.from_steps)} to {rounded(following.from_steps)} {crossing.arm}")
    return "; ".join([*words, f"above, {near[-1].arm}{beyond}"])
