"""The sweep's table: a row for each cell beside its eager one, and the verdict over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.summary import Cell, summarize
from trainer.telemetry.record import RunRecord


def record(label: str, **figures: Any) -> RunRecord:
    return RunRecord(task="toy", **{"label": label, "status": "finished", **figures})


def cell(one: RunRecord | None, directory: Path, *overrides: str, exit_code: int = 0) -> Cell:
    return Cell(overrides=list(overrides), directory=directory, exit_code=exit_code, record=one)


EAGER = record("eager", steady_steps_per_second=10.0, warmup_seconds=1.0)


def test_the_table_says_what_never_pays_back(tmp_path: Path) -> None:
    records = [EAGER, record("whole", steady_steps_per_second=9.0, warmup_seconds=31.0, compile_seconds=30.0)]
    cells = [cell(one, tmp_path, f"compile={one.label}") for one in records]
    text = summarize(cells, planned=2, sweep_dir=tmp_path)
    eager, whole = text.splitlines()[2:4]
    assert "never" in whole
    assert "0.90x" in whole
    assert "never" not in eager


def test_a_cell_is_compared_with_eager_of_its_own_workload_seed_and_round(tmp_path: Path) -> None:
    def run(label: str, rate: float, batch_size: int, **others: Any) -> RunRecord:
        config = {"task": {"batch_size": batch_size}, "compile": {label: {}}}
        return record(label, steady_steps_per_second=rate, warmup_seconds=1.0, config=config, **others)

    records = [
        run("eager", 10.0, 8, round=1),
        run("eager", 5.0, 16, round=1),
        run("eager", 8.0, 8, round=2),
        run("whole", 20.0, 8, round=1),
        run("whole", 20.0, 16, round=1),
        run("whole", 20.0, 8, round=2),
        run("whole", 20.0, 32, round=1),
    ]
    cells = [cell(one, tmp_path, str(number)) for number, one in enumerate(records)]
    rows = summarize(cells, planned=7, sweep_dir=tmp_path).splitlines()[2:9]
    assert [row.split()[3] for row in rows] == ["1.00x", "1.00x", "1.00x", "2.00x", "4.00x", "2.50x", "-"]


def test_the_verdict_and_the_command_for_more_come_after_the_table(tmp_path: Path) -> None:
    def runs(label: str, rate: float, warmup: float) -> list[RunRecord]:
        return [
            record(label, steady_steps_per_second=rate, warmup_seconds=warmup, round=number, start="cold")
            for number in (1, 2, 3)
        ]

    cells = [cell(one, tmp_path) for one in (*runs("eager", 10.0, 1.0), *runs("whole", 20.0, 31.0))]
    lines = summarize(cells, planned=6, sweep_dir=tmp_path / "two words").splitlines()
    assert lines[-3] == "toy: for fewer than 600 steps use eager; above, whole"
    assert lines[-2:] == [
        f"{tool} '{tmp_path}/two words'" for tool in ("python -m scripts.compare", "tensorboard --logdir")
    ]


def test_cells_that_failed_or_left_nothing_are_told(tmp_path: Path) -> None:
    failed = record("whole", status="failed", reason="RuntimeError: no\nmore")
    cells = [cell(failed, tmp_path, "a", exit_code=1), cell(None, tmp_path, "b", exit_code=-9)]
    lines = summarize(cells, planned=3, sweep_dir=tmp_path).splitlines()
    assert lines[2].split()[:2] == ["a", "failed"]
    assert lines[3].startswith("b     killed (SIGKILL)")
    assert lines[4:6] == ["a: RuntimeError: no", "stopped after 2 of 3 cells"]


def test_inferences_have_columns_of_their_own_and_are_compared_by_batches(tmp_path: Path) -> None:
    def inferred(label: str, milliseconds: float, **figures: Any) -> RunRecord:
        rate = 1e3 / milliseconds
        seconds = {f"latency_seconds_{name}": milliseconds / 1e3 for name in ("median", "p95")}
        return record(
            label, run="inference", batches_per_second=rate, samples_per_second=32 * rate, **seconds, **figures
        )

    eager = inferred("eager", 10.0, warmup_seconds=1.0)
    whole = inferred("whole", 5.0, warmup_seconds=21.0, compile_seconds=20.0)
    cells = [cell(one, tmp_path, f"compile={one.label}") for one in (eager, whole, EAGER)]
    _, trained, _, _, heading, first, second, *_ = summarize(cells, planned=3, sweep_dir=tmp_path).splitlines()
    assert "steps/s" in trained
    assert "median ms" in heading
    assert first.split()[2:6] == ["10.00", "10.00", "3,200.0", "1.00x"]
    assert second.split()[2:8] == ["5.00", "5.00", "6,400.0", "2.00x", "4,000", "batches"]
