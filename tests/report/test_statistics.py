"""Statistics: hand-computed intervals, and a simulation of what they promise."""

from __future__ import annotations

import math

import pytest

from trainer.report.statistics import Sample, estimate, ratio, t_quantile


def samples(*seconds: float, paired: bool = True) -> list[Sample]:
    return [Sample(value, number if paired else "same") for number, value in enumerate(seconds)]


def test_an_estimate_is_a_median_with_its_range_and_no_range_for_one() -> None:
    three = estimate([2.0, None, 1.0, 4.0])
    assert (three.median, three.low, three.high) == (2.0, 1.0, 4.0)
    one = estimate([2.0])
    assert (one.low, one.high) == (None, None)
    assert estimate([None]) is None


def test_pairs_are_judged_by_the_spread_of_their_own_ratios() -> None:
    # The machine is twice as slow in the last round, for both: ratios of 2, 2.1 and 2 all the same.
    found = ratio(samples(1.0, 1.0, 2.0), samples(2.0, 2.1, 4.0))
    middle = (2 * math.log(2.0) + math.log(2.1)) / 3
    half = 4.3027 * (math.log(2.1) - math.log(2.0)) / 3  # the deviation of (0, d, 0) is d / sqrt(3)
    assert found.value == pytest.approx(math.exp(middle))
    assert found.low == pytest.approx(math.exp(middle - half))
    assert found.high == pytest.approx(math.exp(middle + half))
    assert (found.pairs, found.verdict) == (3, "faster")


def test_runs_that_do_not_pair_are_compared_by_welchs_t() -> None:
    ours, theirs = samples(1.0, 1.1, 0.9, paired=False), samples(1.5, 1.6, 1.4, paired=False)
    found = ratio(ours, theirs)
    first, second = ([math.log(sample.seconds) for sample in side] for side in (ours, theirs))
    variances = [sum((x - sum(side) / 3) ** 2 for x in side) / 2 / 3 for side in (first, second)]
    degrees = sum(variances) ** 2 / sum(variance**2 / 2 for variance in variances)
    half = t_quantile(degrees) * math.sqrt(sum(variances))
    assert found.value == pytest.approx(math.exp(sum(second) / 3 - sum(first) / 3))
    assert found.low == pytest.approx(found.value * math.exp(-half))
    assert (found.pairs, found.verdict) == (0, "faster")


def test_single_runs_have_a_ratio_without_interval_and_show_nothing() -> None:
    for arm, baseline in (
        (samples(1.0), samples(2.0)),
        (samples(1.0), samples(2.0, 2.0)),
        (samples(1.0, 1.0), samples(2.0)),
    ):
        found = ratio(arm, baseline)
        assert (found.value, found.low, found.high, found.shown) == (2.0, None, None, False)
    assert ratio([], samples(1.0)) is None
    slower = ratio(samples(2.0, 2.0, 2.0), samples(1.0, 1.0, 1.01))
    assert slower.verdict == "slower"


def test_arms_closer_than_their_own_runs_are_equal_however_narrow_the_interval() -> None:
    """Each run takes 2% longer than the one before, whatever its arm: the later arm of a round only looks slower."""
    paces = [1.02**turn for turn in range(8)]
    found = ratio(samples(*paces[1::2]), samples(*paces[::2]))
    assert found.high < 1, "by the interval alone it is slower"
    assert not found.shown
    twice = ratio(samples(*paces[1::2]), samples(*(2 * pace for pace in paces[::2])))
    assert twice.verdict == "faster"


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (4.9, 2.7764), (12, 2.1788), (13, 2.1604), (60, 2.0003)])
def test_quantiles_are_those_of_the_tables(degrees: float, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=2e-4)
