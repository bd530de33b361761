"""Step times and rates: what is steady and what is not, percentiles, and figures that do not exist."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.trainer.clock import Clock
from trainer.telemetry.meter import (
    MAX_POINTS,
    Meter,
    Step,
    StepClock,
    Totals,
    percentile,
    shape_of,
)
from trainer.telemetry.record import Rates, RunRecord
from trainer.telemetry.telemetry import SeenShapes


def step(number: int, seconds: float = 0.1, *, compiled: bool = False, **counts: int | None) -> Step:
    samples, tokens, useful, flops = map(counts.get, ("samples", "tokens", "useful_tokens", "flops"))
    return Step(number, compiled=compiled, seconds=seconds, counts=(samples, tokens, useful, flops))


def filled(meter: Meter) -> RunRecord:
    record = RunRecord(task="any")
    meter.fill(record)
    return record


def test_first_steps_and_compiled_steps_are_warm_up_and_the_others_steady() -> None:
    meter = Meter(warmup_steps=2)
    seconds = [5.0, 0.3, 0.1, 7.0, 0.2, 0.3]
    steady = [meter.add(step(number, value, compiled=number == 4)) for number, value in enumerate(seconds, start=1)]
    assert steady == [False, False, True, False, True, True]
    figures = filled(meter)
    assert figures.first_step_seconds == 5.0
    assert figures.warmup_seconds == pytest.approx(5.0 + 0.3 + 7.0)
    assert (figures.warmup_steps, figures.steady_steps) == (3, 3)
    assert figures.steady_step_seconds_mean == pytest.approx(0.2)
    assert figures.steady_step_seconds_median == pytest.approx(0.2)
    assert meter.steady.rates().steady_steps_per_second == pytest.approx(3 / 0.6)


def test_new_shapes_before_a_switch_are_not_counted_against_steady_steps_after_it() -> None:
    meter = Meter(warmup_steps=0)
    for new_shape in (False, True):
        meter.add(Step(1, seconds=9.0, new_shape=new_shape))
    meter.restart()
    meter.add(step(2))
    assert (filled(meter).new_shape_steps, filled(meter).new_shape_seconds) == (0, None)
    meter.add(Step(3, seconds=0.4, new_shape=True))
    assert filled(meter).new_shape_seconds == pytest.approx(0.3)


def test_a_run_without_a_steady_step_has_no_steady_figures() -> None:
    meter = Meter(warmup_steps=5)
    meter.add(step(1))
    figures = filled(meter)
    assert figures.steady_steps == 0
    for name in ("mean", "median", "p95"):
        assert getattr(figures, f"steady_step_seconds_{name}") is None
    assert meter.steady.rates() == Rates()


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 100, 101])
@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
def test_percentiles_are_numpys_by_nearest_rank(count: int, share: float) -> None:
    values = numpy.random.default_rng(count).random(count)
    assert percentile(list(values), share) == numpy.quantile(values, share, method="inverted_cdf")
    assert percentile([], share) is None


def test_rates_are_sums_over_time() -> None:
    totals = Totals()
    totals.add(step(1, 0.5, samples=4, tokens=40, useful_tokens=30, flops=10**12))
    totals.add(step(2, 1.5, samples=4, tokens=60, useful_tokens=60, flops=10**12))
    assert dataclasses.asdict(totals.rates()) == {
        "steady_steps_per_second": 1.0,
        "samples_per_second": 4.0,
        "tokens_per_second": 50.0,
        "useful_tokens_per_second": 45.0,
        "padded_share": pytest.approx(0.1),
        "teraflops_per_second": pytest.approx(1.0),
        "data_wait_share": None,
    }


@pytest.mark.parametrize("missing_first", [True, False])
def test_a_figure_that_one_step_lacks_is_not_guessed_from_the_others(missing_first: bool) -> None:
    steps = [step(1, samples=4), step(2, samples=4, tokens=40, useful_tokens=30, flops=10**12)]
    totals = Totals()
    for one in steps if missing_first else reversed(steps):
        totals.add(one)
    rates = totals.rates()
    assert rates.samples_per_second == pytest.approx(40.0)
    for name in ("tokens_per_second", "useful_tokens_per_second", "padded_share", "teraflops_per_second"):
        assert getattr(rates, name) is None, name


def test_a_step_is_its_laps_and_its_end_counts_what_lies_between_them(clock: Clock) -> None:
    laps, first, second = StepClock(torch.device("cpu")), Step(1), Step(2)
    clock.sleep(0.2)
    laps.mark()
    clock.sleep(1.0)
    laps.lap(first)
    clock.sleep(0.5)
    laps.lap(second)
    clock.sleep(7.0)  # a validation inside an accumulation
    laps.mark()
    clock.sleep(0.25)
    laps.lap(second)
    for one in (first, second, first):
        laps.read(one)
    assert [first.seconds, second.seconds] == pytest.approx([1.0, 0.75])
    assert list(laps.ends) == pytest.approx([1.0, 8.75])
    assert first.waited_seconds is None


@pytest.mark.parametrize("steps", [0, 5, MAX_POINTS - 1, MAX_POINTS, 10 * MAX_POINTS + 3])
def test_progress_holds_the_first_and_the_last_step_and_not_too_many(steps: int) -> None:
    laps = StepClock(torch.device("cpu"))
    laps.ends.extend(0.5 * (step + 1) for step in range(steps))
    points = laps.progress(7.0)
    assert points[0] == [0, 7.0]
    assert points[-1] == [steps, 7.0 + 0.5 * steps]
    assert points == sorted(points)
    assert min(steps, MAX_POINTS // 2) <= len(points) - 1 <= MAX_POINTS
    assert all(seconds == 7.0 + 0.5 * done for done, seconds in points)


def test_a_curve_of_losses_is_of_all_steps_and_not_too_long() -> None:
    meter = Meter(warmup_steps=0)
    assert meter.loss_points() == []
    meter.losses = [(5, 2.0, 5), (7, 1.0, 2)]
    assert meter.loss_points() == [[5, 2.0], [7, 1.0]]
    meter.losses = [(10 * (place + 1), float(place), 10) for place in range(MAX_POINTS + 1)]
    points = meter.loss_points()
    assert (points[0], points[-1], len(points)) == ([20, 0.5], [10 * (MAX_POINTS + 1), 256.0], 129)


def test_shapes_are_those_of_the_tensors_of_any_kind_of_batch() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    for batch in ((x, y), [x, y], {"x": x, "n": 3, "y": y}, SimpleNamespace(x=x, y=y)):
        assert shape_of(batch) == ((2, 3), (2,))
    assert shape_of(None) == ()
    nested = torch.nested.nested_tensor([x, x[:1]])  # which has none
    assert (shape_of(nested), shape_of((nested, y))) == (("nested",), ("nested", (2,)))


def test_a_new_shape_counts_unless_most_batches_have_one_of_their_own() -> None:
    again, own = SeenShapes(), SeenShapes()
    found = [(again.is_new(torch.zeros(1 + number % 40)), own.is_new(torch.zeros(1 + number))) for number in range(100)]
    assert found[:16] == [(False, False)] + [(True, True)] * 15
    assert found[16:] == [(False, False)] * 84, "40 shapes are many until they come again"
    assert again.is_new(torch.zeros(200))
    assert not again.is_new(torch.zeros(200)), "it is not new"
    assert not own.is_new(torch.zeros(200))
