"""Flags and likeness: what weakens a comparison is told with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.records import record
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run, parity_of
from trainer.telemetry.record import Event, RunRecord


def against_eager(*records: RunRecord) -> WorkloadComparison:
    eager = [record("eager", warmup_seconds=1.0, round=turn) for turn in (1, 2)]
    (found,) = compare([Run(Path(str(number)), one) for number, one in enumerate([*eager, *records], -1)])
    return found


def flags(*records: RunRecord) -> list[str]:
    return against_eager(*records).rows[1].flags


def fallback(reason: str) -> Event:
    return Event(kind="fallback", reason=reason)


def whole(**changes: Any) -> RunRecord:
    values = {"start": "cold", "warmup_seconds": 9.0, "compile_seconds": 6.0}
    return record("whole", step_seconds=0.05, **{**values, **changes})


def test_a_sound_run_has_none() -> None:
    assert flags(whole()) == []
    assert flags(whole(events=[Event(kind="recompile", reason="size", phase="validating")])) == []
    nothing = {"parity": {"verdict": "skipped", "reason": "nothing compiled"}}
    assert flags(whole(report=nothing)) == []


def test_a_run_under_the_profiler_is_left_out_beside_others_and_compared_with_its_like() -> None:
    eager, slowed = record("eager", warmup_seconds=1.0), record("whole", step_seconds=0.5, warmup_seconds=9.0)
    slowed.config["profile"] = eager.config["profile"] = "on"
    found = against_eager(*(whole(round=turn) for turn in (1, 2)), slowed)
    assert found.rows[1].ratio is not None
    assert found.rows[1].ratio.value == pytest.approx(2.0)
    assert found.rows[1].flags == ["1 run under the profiler left out"]
    (alone,) = compare([Run(Path(str(number)), one) for number, one in enumerate((eager, slowed))])
    assert alone.rows[1].ratio is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steady_steps": 19}, "thin: 19 steady steps"),
        ({"new_shape_steps": 60, "steady_steps": 100}, "thin: 38% of its steps met a new shape and are left out"),
        ({"final_loss": 0.6}, "final loss 0.6000, the baseline's 0.4652"),
        (
            {"events": [Event(kind="graph_break", reason="print")] * 2},
            "2 graph breaks; python -m scripts.explain names the lines",
        ),
        (
            {"events": [Event(kind="recompile", reason="size")]},
            "1 recompile; python -m scripts.report lists the reasons",
        ),
        ({"start": None, "cache": None}, "cache state unknown: its warm-up is counted as a cold start's"),
        ({"status": "running"}, "still running, or killed while it was (1)"),
        ({"status": "interrupted", "steps": 1200, "reason": "SIGINT"}, "interrupted after 1,200 steps: SIGINT (1)"),
        (
            {"report": {"parity": {"verdict": "not compared", "reason": "it draws"}}},
            "comparison with eager: not compared: it draws",
        ),
        (
            {"report": {"parity": {"verdict": "skipped", "reason": "manual optimization"}}},
            "comparison with eager: skipped: manual optimization",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_weakens_a_run_is_told(changes: dict[str, Any], said: str) -> None:
    assert flags(whole(**changes)) == [said]


def test_runs_that_scatter_are_thin_and_some_of_several_are_counted() -> None:
    runs = [
        whole(round=number, steady_steps_per_second=rate, samples_per_second=32 * rate)
        for number, rate in enumerate((20.0, 25.0))
    ]
    runs[1].eager_parts = {"net": "no reason"}
    assert flags(*runs) == ["ran eager in part (1 of 2 runs): no reason", "thin: its runs differ by 22%"]


def test_what_fell_back_to_eager_altogether_is_never_recommended() -> None:
    line = "slower than eager: a step takes 5 ms; on_slower=eager: 2 regions go on eager"
    undone = [
        whole(events=[fallback(line)], ended_in_eager=True, eager_parts={"net": line}, round=turn) for turn in (1, 2)
    ]
    found = against_eager(*undone)
    assert found.rows[1].flags == [f"ended in eager: {line}"]
    assert [crossing.arm for crossing in found.crossings] == ["eager"]
    part = "on_compile_error=eager: compile=optimizer runs eager, it did not compile: no"
    facts = {"events": [fallback(part)], "ended_in_eager": False, "eager_parts": {"optimizer": part}}
    partly = against_eager(*(whole(**facts, round=turn) for turn in (1, 2)))
    assert partly.rows[1].flags == [f"ran eager in part: {part}"]
    assert [crossing.arm for crossing in partly.crossings] == ["eager", "whole"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "NVIDIA A100"}, "device: NVIDIA H200 (2 runs), NVIDIA A100 (2 runs)"),
        ({"precision": "32-true"}, "precision: bf16-mixed (2 runs), 32-true (2 runs)"),
        ({"world_size": 8}, "world size: 1 (2 runs), 8 (2 runs)"),
        ({"versions": {"torch": "2.15.0"}}, "torch: 2.11.0 (2 runs), 2.15.0 (2 runs)"),
        ({"schema": 1}, "record schema: 2 (2 runs), 1 (2 runs)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unlike_runs_are_found_and_marked(changes: dict[str, Any], said: str) -> None:
    found = against_eager(whole(**changes), whole(**changes, round=1))
    assert found.unlike == [said]
    assert found.verdict.endswith("(of runs that are unlike)")


def test_a_comparison_that_said_nothing_is_graver_than_one_that_passed() -> None:
    first = {"parity": {"verdict": "passed"}}
    second = {"parity": {"verdict": "not compared", "reason": "it draws"}}
    found = against_eager(whole(report=first), whole(report=second)).rows[1].cell
    assert parity_of(found) == "not compared: it draws"
