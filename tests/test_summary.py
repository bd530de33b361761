"""The sweep's verdict: after how many steps a compiled run has caught up with an eager one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trainer.summary import Cell, break_even_steps, summarize
from trainer.telemetry.record import RunRecord


def record(label: str, **figures: Any) -> RunRecord:
    return RunRecord(task="toy", label=label, status="finished", **figures)


EAGER = record("eager", steady_steps_per_second=10.0, warmup_seconds=1.0)


def test_break_even_is_where_the_two_runs_have_taken_the_same_time() -> None:
    faster = record("whole", steady_steps_per_second=20.0, warmup_seconds=31.0, compile_seconds=20.0)
    steps = break_even_steps(faster, EAGER)
    assert steps is not None
    assert 1.0 + steps / 10.0 == pytest.approx(31.0 + steps / 20.0)


def test_validations_compiles_have_to_be_paid_back_too() -> None:
    late = record("whole", steady_steps_per_second=20.0, warmup_seconds=31.0, compile_seconds=60.0)
    assert break_even_steps(late, EAGER) == pytest.approx(60.0 / 0.05)


def test_what_is_no_faster_never_pays_back_and_what_is_not_known_is_not_guessed() -> None:
    slower = record("whole", steady_steps_per_second=9.0, warmup_seconds=31.0)
    assert break_even_steps(slower, EAGER) == math.inf
    assert break_even_steps(record("whole", steady_steps_per_second=20.0), EAGER) is None


def test_the_table_says_so(tmp_path: Path) -> None:
    records = [EAGER, record("whole", steady_steps_per_second=9.0, warmup_seconds=31.0, compile_seconds=30.0)]
    cells = [Cell(overrides=[f"compile={one.label}"], directory=tmp_path, exit_code=0, record=one) for one in records]
    text = summarize(cells, planned=2, sweep_dir=tmp_path)
    eager, whole = text.splitlines()[2:4]
    assert "never" in whole
    assert "0.90x" in whole
    assert "never" not in eager


def test_inferences_have_columns_of_their_own_and_are_compared_by_batches(tmp_path: Path) -> None:
    def inferred(label: str, milliseconds: float, **figures: Any) -> RunRecord:
        rate = 1e3 / milliseconds
        seconds = {f"latency_seconds_{name}": milliseconds / 1e3 for name in ("median", "p95")}
        return record(
            label, run="inference", batches_per_second=rate, samples_per_second=32 * rate, **seconds, **figures
        )

    eager = inferred("eager", 10.0, warmup_seconds=1.0)
    whole = inferred("whole", 5.0, warmup_seconds=21.0, compile_seconds=20.0)
    cells = [
        Cell(overrides=[f"compile={one.label}"], directory=tmp_path, exit_code=0, record=one)
        for one in (eager, whole, EAGER)
    ]
    assert break_even_steps(whole, eager) == pytest.approx(20.0 / 0.005)
    _, trained, _, _, heading, first, second, *_ = summarize(cells, planned=3, sweep_dir=tmp_path).splitlines()
    assert "steps/s" in trained
    assert "median ms" in heading
    assert first.split()[2:6] == ["10.00", "10.00", "3,200.0", "1.00x"]
    assert second.split()[2:8] == ["5.00", "5.00", "6,400.0", "2.00x", "4,000", "batches"]
