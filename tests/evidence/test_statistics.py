"""Statistics: hand-computed intervals, and a simulation of what they promise."""

from __future__ import annotations

import math
import random

import pytest

from trainer.evidence.statistics import BETWEEN_RUNS, Sample, estimate, ratio, t_quantile


def samples(*seconds: float, error: float | None = None, paired: bool = True) -> list[Sample]:
    return [Sample(value, error, number if paired else "same") for number, value in enumerate(seconds)]


def test_an_estimate_is_a_median_with_its_range_and_no_range_for_one() -> None:
    three = estimate([2.0, None, 1.0, 4.0])
    assert three is not None
    assert (three.median, three.low, three.high, three.count) == (2.0, 1.0, 4.0, 3)
    one = estimate([2.0])
    assert one is not None
    assert (one.low, one.high, one.count) == (None, None, 1)
    assert estimate([None]) is None


def test_pairs_are_judged_by_the_spread_of_their_own_ratios() -> None:
    # The machine is twice as slow in the last round, for both: ratios of 2, 2.1 and 2 all the same.
    found = ratio(samples(1.0, 1.0, 2.0), samples(2.0, 2.1, 4.0))
    assert found is not None
    middle = (2 * math.log(2.0) + math.log(2.1)) / 3
    half = 4.3027 * (math.log(2.1) - math.log(2.0)) / 3  # the deviation of (0, d, 0) is d / sqrt(3)
    assert found.value == pytest.approx(math.exp(middle))
    assert found.low == pytest.approx(math.exp(middle - half))
    assert found.high == pytest.approx(math.exp(middle + half))
    assert (found.pairs, found.basis, found.verdict) == (3, "pairs", "faster")


def test_runs_that_do_not_pair_are_compared_by_welchs_t() -> None:
    ours, theirs = samples(1.0, 1.1, 0.9, paired=False), samples(1.5, 1.6, 1.4, paired=False)
    found = ratio(ours, theirs)
    assert found is not None
    first, second = ([math.log(sample.seconds) for sample in side] for side in (ours, theirs))
    variances = [sum((x - sum(side) / 3) ** 2 for x in side) / 2 / 3 for side in (first, second)]
    degrees = sum(variances) ** 2 / sum(variance**2 / 2 for variance in variances)
    half = t_quantile(degrees) * math.sqrt(sum(variances))
    assert found.value == pytest.approx(math.exp(sum(second) / 3 - sum(first) / 3))
    assert found.low == pytest.approx(found.value * math.exp(-half))
    assert (found.pairs, found.basis, found.verdict) == (0, "runs", "faster")


def test_single_runs_are_compared_by_their_steps_with_room_for_what_differs_between_runs() -> None:
    found = ratio(samples(1.0, error=0.01), samples(1.04, error=0.02))
    assert found is not None
    half = 1.959964 * math.hypot(0.01, 0.02)
    assert found.low == pytest.approx(1.04 * math.exp(-half) / BETWEEN_RUNS)
    assert found.high == pytest.approx(1.04 * math.exp(half) * BETWEEN_RUNS)
    assert (found.basis, found.verdict) == ("steps", "no difference shown")
    steady = ratio(samples(1.0, error=0.0), samples(1.04, error=0.0))
    assert steady is not None
    assert steady.verdict == "no difference shown"  # less than runs differ by


def test_without_any_spread_nothing_is_shown_and_without_a_side_there_is_no_ratio() -> None:
    found = ratio(samples(1.0), samples(2.0))
    assert found is not None
    assert (found.value, found.low, found.verdict, found.basis) == (2.0, None, "no difference shown", "none")
    assert ratio([], samples(1.0)) is None
    slower = ratio(samples(2.0, 2.0, 2.0), samples(1.0, 1.0, 1.01))
    assert slower is not None
    assert slower.verdict == "slower"


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (4.9, 2.7764), (12, 2.1788), (13, 2.1604), (60, 2.0003)])
def test_quantiles_are_those_of_the_tables(degrees: float, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize(("count", "paired"), [(2, True), (3, True), (3, False), (6, True), (6, False)])
def test_the_interval_holds_the_truth_as_often_as_it_says(count: int, paired: bool) -> None:
    """Rounds share a pace, runs have noise of their own, arms are alike: 95% of intervals hold 1."""
    noise, held, trials = random.Random(count), 0, 2000
    exact = paired and count > 2
    for _ in range(trials):
        paces = [noise.gauss(0, 0.1 if paired else 0.0) for _ in range(count)]
        sides = [samples(*(math.exp(pace + noise.gauss(0, 0.02)) for pace in paces), paired=paired) for _ in range(2)]
        found = ratio(sides[0], sides[1])
        assert found is not None
        assert found.basis == ("pairs" if exact else "runs")
        held += found.verdict == "no difference shown"
    # Student's interval is exact: 95% give or take 3 standard errors of 0.5%. Welch's errs to the wide side.
    assert 0.935 <= held / trials <= (0.965 if exact else 1.0)
