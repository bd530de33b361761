"""Total time: break-even is where two lines meet, the envelope is the least of several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.report.records import record
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run
from trainer.report.statistics import Cost, break_even_steps, envelope, overhead_seconds

EAGER = Cost(step_seconds=0.1, warmup_seconds=1.0)


def cost(step_seconds: float, warmup_seconds: float, **others: Any) -> Cost:
    return Cost(step_seconds=step_seconds, warmup_seconds=warmup_seconds, **others)


def test_break_even_is_where_the_two_have_taken_the_same_time() -> None:
    steps = break_even_steps(cost(0.05, 31.0, compile_seconds=20.0), EAGER)
    assert 1.0 + steps * 0.1 == pytest.approx(31.0 + steps * 0.05)


def test_steps_of_the_warm_up_are_steps_done() -> None:
    eager, faster = cost(0.1, 1.5, warmup_steps=5), cost(0.05, 31.0, warmup_steps=10)
    steps = break_even_steps(faster, eager)
    assert 1.5 + (steps - 5) * 0.1 == pytest.approx(31.0 + (steps - 10) * 0.05)


def test_validations_compiles_have_to_be_paid_back_too() -> None:
    late = cost(0.05, 31.0, compile_seconds=60.0)
    assert break_even_steps(late, EAGER) == pytest.approx(60.0 / 0.05)
    assert overhead_seconds(late, EAGER) == pytest.approx(61.0)


def test_against_a_compiled_baseline_both_pay_for_their_compiling() -> None:
    slow, fast = cost(0.08, 11.0, compile_seconds=10.0), cost(0.05, 31.0, compile_seconds=30.0)
    assert break_even_steps(fast, slow) == pytest.approx(20.0 / 0.03)


def test_what_is_no_faster_never_pays_back_and_what_costs_nothing_does_at_once() -> None:
    assert break_even_steps(cost(0.11, 31.0), EAGER) == math.inf
    assert break_even_steps(cost(0.05, 0.5), EAGER) == 0


def cost_of(**figures: Any) -> Cost | None:
    (found,) = compare([Run(Path("whole"), record("whole", **figures))])
    return found.rows[0].cost


def test_a_record_that_lacks_a_figure_has_no_cost() -> None:
    assert cost_of(warmup_seconds=None) is None
    assert cost_of(warmup_seconds=3.0, steady_steps_per_second=None) is None
    found = cost_of(warmup_seconds=3.0, steady_steps_per_second=10.0, compile_seconds=2.0)
    assert found == Cost(step_seconds=0.1, warmup_seconds=3.0, warmup_steps=5, compile_seconds=2.0)


def test_the_envelope_changes_arms_where_their_lines_cross() -> None:
    costs = {"eager": EAGER, "whole": cost(0.04, 61.0), "regional": cost(0.05, 11.0), "poor": cost(0.09, 51.0)}
    assert [(one.from_steps, one.arm) for one in envelope(costs, EAGER)] == [
        (0, "eager"),
        (200, "regional"),  # 10 s at 0.05 s a step
        (5000, "whole"),  # 50 s at 0.01 s a step
    ]


def test_the_envelope_is_the_least_line_at_every_number_of_steps() -> None:
    costs = {str(step): cost(0.1 - 0.012 * step, 3.0 + step**2) for step in range(7)}
    base = costs["0"]
    crossings = envelope(costs, base)
    assert len(crossings) > 3
    for steps in range(1, 3000, 7):
        totals = {arm: overhead_seconds(one, base) + steps * one.step_seconds for arm, one in costs.items()}
        chosen = [one.arm for one in crossings if one.from_steps <= steps][-1]
        assert totals[chosen] == pytest.approx(min(totals.values()))


def test_an_arm_that_is_best_from_the_first_step_is_the_only_one() -> None:
    costs = {"eager": EAGER, "cuda_graph": cost(0.05, 1.0)}
    assert [one.arm for one in envelope(costs, EAGER)] == ["cuda_graph"]
