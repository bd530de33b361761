"""Comparison: ratios, break-even and total times of hand-made runs, and the sentence that they come to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.report.records import ragged, record
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run
from trainer.report.statistics import rounded
from trainer.telemetry.record import RunRecord


def compared(*records: RunRecord, **options: Any) -> list[WorkloadComparison]:
    return compare([Run(Path(str(number)), one) for number, one in enumerate(records)], **options)


def steady(arm: str, milliseconds: float, *, warmup: float | None = 1.0, **changes: Any) -> RunRecord:
    """A run of exactly that pace, without scatter; imports and setup take 10 s."""
    seconds = milliseconds / 1e3
    values = {
        "steady_steps_per_second": 1 / seconds,
        "samples_per_second": 32 / seconds,
        "warmup_seconds": warmup,
        "warmup_steps": 0,
        "import_seconds": 7.0,
        "setup_seconds": 3.0,
    }
    return record(arm, step_seconds=seconds, **{**values, **changes})


def rounds(arm: str, milliseconds: float, count: int = 3, **changes: Any) -> list[RunRecord]:
    return [steady(arm, milliseconds, round=number, start="cold", **changes) for number in range(count)]


def test_ratio_break_even_and_total_times_are_those_computed_by_hand() -> None:
    faster = rounds("whole", 50, warmup=31.0, compile_seconds=20.0)
    (found,) = compared(*faster, *rounds("eager", 100), at_steps=[100, 2000])
    eager, whole = found.rows
    assert (eager.cell.arm, eager.ratio, eager.break_even_steps) == ("eager", None, None)
    assert whole.ratio is not None
    assert (whole.ratio.value, whole.ratio.verdict, whole.ratio.pairs) == (pytest.approx(2.0), "faster", 3)
    assert whole.break_even_steps == pytest.approx(30.0 / 0.05)
    assert eager.total_seconds == pytest.approx({100: 10 + 1 + 10, 2000: 10 + 1 + 200})
    assert whole.total_seconds == pytest.approx({100: 10 + 31 + 5, 2000: 10 + 31 + 100})
    assert [(one.from_steps, one.arm) for one in found.crossings] == [(0, "eager"), (600, "whole")]
    assert found.verdict == "for fewer than 600 steps use eager; above, whole"
    assert found.unlike == []


def test_waiting_for_the_compiler_in_the_setup_is_the_arms_own_cost() -> None:
    faster = rounds("whole", 50, warmup=31.0, compile_seconds=20.0, setup_seconds=5.0, preparation_seconds=2.0)
    (found,) = compared(*faster, *rounds("eager", 100), at_steps=[100])
    eager, whole = found.rows
    assert eager.total_seconds == pytest.approx({100: 10 + 1 + 10}), "the start is without it"
    assert whole.total_seconds == pytest.approx({100: 10 + 2 + 31 + 5})
    assert whole.break_even_steps == pytest.approx((2 + 30) / 0.05)
    assert whole.flags == eager.flags == [], "the rest of their setups is alike"


def test_cold_starts_decide_and_warm_ones_where_no_arm_started_cold() -> None:
    warm = [steady("whole", 50, warmup=3.0, round=number, start="warm", compile_seconds=1.0) for number in range(3)]
    cold = rounds("whole", 50, warmup=31.0, compile_seconds=20.0)
    (both,) = compared(*rounds("eager", 100), *cold, *warm)
    assert (both.start, both.verdict) == ("cold", "for fewer than 600 steps use eager; above, whole")
    whole = both.rows[1]
    assert whole.warm_warmup_seconds is not None
    assert (whole.break_even_steps, whole.warm_warmup_seconds.median) == (pytest.approx(600), 3.0)
    (filled,) = compared(*rounds("eager", 100), *warm)
    assert (filled.start, filled.verdict) == (
        "warm",
        "with warm caches: for fewer than 40 steps use eager; above, whole",
    )
    assert filled.rows[1].break_even_steps == pytest.approx(40)
    assert filled.rows[1].total_seconds[500] == pytest.approx(10 + 3 + 25)


def test_what_is_slower_or_pays_back_too_late_is_said_plainly() -> None:
    (slower,) = compared(*rounds("eager", 100), *rounds("whole", 110, warmup=31.0))
    assert slower.rows[1].break_even_steps == math.inf
    assert slower.verdict == "no strategy tried is shown to beat eager for any number of steps"
    (late,) = compared(*rounds("eager", 100), *rounds("whole", 99, warmup=61.0))
    assert late.verdict == "for fewer than 60,000 steps use eager; above, whole"


def test_where_no_difference_is_shown_there_is_no_break_even_and_no_advice() -> None:
    scattered = [steady("whole", pace, round=number, start="cold") for number, pace in enumerate((80, 120, 95))]
    (found,) = compared(*rounds("eager", 100), *scattered)
    assert found.rows[1].ratio is not None
    assert found.rows[1].ratio.verdict == "no difference shown"
    assert found.rows[1].break_even_steps is None
    assert found.verdict.startswith("no difference from eager is shown")
    assert [crossing.arm for crossing in found.crossings] == ["eager"]


def test_what_the_machine_does_from_round_to_round_moves_neither_ratio_nor_break_even() -> None:
    paces = {1: 1.0, 2: 1.2, 3: 0.9, 4: 1.1}
    pairs = [
        steady(arm, milliseconds * pace, round=number, start="cold", warmup=warmup)
        for number, pace in paces.items()
        for arm, milliseconds, warmup in (("eager", 100, 1.0), ("whole", 80, 31.0))
        if (arm, number) != ("eager", 2)  # which failed
    ]
    (found,) = compared(*pairs)
    whole = found.rows[1]
    assert whole.ratio is not None
    assert whole.ratio.value == pytest.approx(100 / 80)
    assert (whole.ratio.pairs, whole.ratio.verdict) == (3, "faster")
    assert whole.break_even_steps == pytest.approx(30.0 / 0.020)


def test_steps_of_another_size_are_compared_by_their_samples() -> None:
    twice = rounds("buckets", 100, samples_per_second=640.0, warmup=2.0)
    (found,) = compared(*rounds("eager", 100), *twice, at_steps=[1000])
    buckets = found.rows[1]
    assert buckets.ratio is not None
    assert buckets.ratio.value == pytest.approx(2.0)
    assert buckets.total_seconds[1000] == pytest.approx(10 + 2 + 50)
    assert any("2.00 times the samples" in flag for flag in buckets.flags)


def test_another_baseline_may_be_asked_for_and_must_be_there() -> None:
    runs = [*rounds("eager", 100), *rounds("whole", 50), *rounds("regional", 60)]
    (found,) = compared(*runs, baseline="regional")
    assert [row.cell.arm for row in found.rows] == ["regional", "eager", "whole"]
    assert found.baseline == "regional"
    with pytest.raises(ValueError, match=r"baseline='hole' is not one of the arms: eager, whole, regional"):
        compared(*runs, baseline="hole")
    several = [*rounds("whole mode=default", 50), *rounds("whole mode=reduce-overhead", 40)]
    with pytest.raises(ValueError, match="baseline='whole' is several arms"):
        compared(*several, baseline="whole")
    (other,) = compared(*several, baseline="whole (mode=default)")
    assert other.rows[1].ratio is not None


def test_without_eager_there_is_no_ratio_and_what_is_missing_is_told() -> None:
    (found,) = compared(*rounds("whole mode=reduce-overhead", 50))
    assert (found.rows[0].ratio, found.crossings, found.baseline_row) == (None, [], None)
    assert found.verdict.endswith("so there is nothing to compare with; compile=eager makes one")
    (failed,) = compared(steady("eager", 100, status="failed", reason="out of memory"), *rounds("whole", 50))
    assert failed.verdict.startswith("no eager run of this workload has finished")


@pytest.mark.parametrize(("options", "said"), [({"at_steps": [0]}, "steps=0 must be at least 1"), ({}, "no runs")])
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compared(*(rounds("eager", 100) if options else []), **options)


def test_a_failed_cell_has_a_row_with_its_reason_and_no_figures() -> None:
    (found,) = compared(*ragged())
    row = found.rows[-1]
    assert row.cell.arm == "whole (mode=max-autotune)"
    assert (row.step_seconds, row.ratio, row.total_seconds) == (None, None, {})
    assert row.flags == ["failed: CUDA out of memory: tried to allocate 2.00 GiB (6)"]


def test_without_warm_up_figures_there_is_a_ratio_and_no_total_time() -> None:
    (found,) = compared(*rounds("eager", 100, warmup=None), *rounds("whole", 50, warmup=None))
    assert found.rows[1].ratio is not None
    assert found.rows[1].ratio.verdict == "faster"
    assert (found.rows[1].break_even_steps, found.rows[1].total_seconds, found.crossings) == (None, {}, [])
    assert found.verdict.startswith("steady steps differ from eager's; without what warming up takes")


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "0"), (6.2, "7"), (99.4, "100"), (934, "930"), (996, "1,000"), (12345, "12,000"), (2.5e6, "2,500,000")],
)
def test_steps_are_told_to_two_digits(steps: float, text: str) -> None:
    assert rounded(steps) == text
