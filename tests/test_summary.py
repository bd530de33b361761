"""The sweep's table: a row for each cell beside its eager one, and the verdict over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.report.sweep import Cell, summarize
from trainer.telemetry.record import RunRecord


def record(label: str, **figures: Any) -> RunRecord:
    return RunRecord(task="toy", **{"label": label, "status": "finished", **figures})


def cell(one: RunRecord | None, directory: Path, *overrides: str, exit_code: int = 0) -> Cell:
    return Cell(overrides=list(overrides), directory=directory, exit_code=exit_code, record=one)


EAGER = record("eager", steady_steps_per_second=10.0, warmup_seconds=1.0)


def summary(cells: list[Cell], directory: Path, *, planned: int | None = None, width: int = 120) -> list[str]:
    text = summarize(cells, planned=planned or len(cells), sweep_dir=directory, width=width)
    assert max(map(len, text.splitlines()[: len(cells) + 4])) <= width
    return text.splitlines()


def row_of(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(f"{name} "))


def turns(label: str, *rates: float, **figures: Any) -> list[RunRecord]:
    figures = {"warmup_seconds": 1.0, "start": "cold", **figures}
    return [
        record(label, steady_steps_per_second=rate, round=number, **figures) for number, rate in enumerate(rates, 1)
    ]


def named(records: list[RunRecord], directory: Path) -> list[Cell]:
    return [cell(one, directory, f"{one.label}-{one.round}") for one in records]


def test_single_runs_claim_no_gain_and_no_payback_in_any_line(tmp_path: Path) -> None:
    """The case that was reported: 1.69x and 622 steps in the table, "no difference is shown" below it."""
    whole = record("whole", steady_steps_per_second=16.9, warmup_seconds=26.4, compile_seconds=25.4)
    lines = summary([cell(one, tmp_path, one.label) for one in (EAGER, whole)], tmp_path)
    assert row_of(lines, "eager") == ["eager", "10.0", "1", "-", "1.00"]
    assert row_of(lines, "whole") == ["whole", "16.9", "~1.69x", "25.4", "26.4"]
    assert "pays back" not in "\n".join(lines)
    assert "toy: single runs show no difference from eager; repeat with hydra.launcher.rounds=3" in lines


def test_the_table_says_what_the_verdict_says_of_every_cell_of_an_arm(tmp_path: Path) -> None:
    faster = turns("whole", 20.0, 20.2, 19.9, warmup_seconds=31.0)
    doubtful = turns("regional", 14.0, 9.0, 10.1)
    slower = turns("cuda_graph", 8.0, 8.1, 7.9)
    cells = named([*turns("eager", 10.0, 10.1, 9.9), *faster, *doubtful, *slower], tmp_path)
    lines = summary(cells, tmp_path)
    assert [row_of(lines, f"whole-{turn}")[3:5] for turn in (1, 2, 3)] == [["2.00x", "600"]] * 3
    assert [row_of(lines, f"regional-{turn}")[3:5] for turn in (1, 2, 3)] == [["~1.08x", "-"]] * 3
    assert [row_of(lines, f"cuda_graph-{turn}")[3:5] for turn in (1, 2, 3)] == [["0.80x", "never"]] * 3
    assert lines[-3] == "toy: for fewer than 600 steps use eager; above, whole"
    assert any(line.startswith("~ no difference is shown") for line in lines)


def test_a_cell_is_compared_with_eager_of_its_own_workload(tmp_path: Path) -> None:
    def run(label: str, rate: float, batch_size: int) -> RunRecord:
        config = {"task": {"batch_size": batch_size}, "compile": {label: {}}}
        return record(label, steady_steps_per_second=rate, warmup_seconds=1.0, config=config)

    records = [run("eager", 10.0, 8), run("eager", 5.0, 16), run("whole", 20.0, 8), run("whole", 20.0, 16)]
    records.append(run("whole", 20.0, 32))
    lines = summary([cell(one, tmp_path, str(number)) for number, one in enumerate(records)], tmp_path)
    assert [row_of(lines, str(number))[2] for number in range(5)] == ["1", "1", "~2.00x", "~4.00x", "-"]


def test_the_table_says_which_caches_a_cell_started_with(tmp_path: Path) -> None:
    records = [record("eager", start="cold"), record("cached", cache="warm"), record("whole", start="cold")]
    lines = summary([cell(one, tmp_path, one.label) for one in records], tmp_path)
    assert [row_of(lines, one.label)[1] for one in records] == ["cold", "warm", "cold"]


def test_the_verdict_and_the_command_for_more_come_after_the_table(tmp_path: Path) -> None:
    records = [*turns("eager", 10.0, 10.0, 10.0), *turns("whole", 20.0, 20.0, 20.0, warmup_seconds=31.0)]
    lines = summary(named(records, tmp_path), tmp_path / "two words")
    assert lines[-3] == "toy: for fewer than 600 steps use eager; above, whole"
    assert lines[-2:] == [
        f"{tool} '{tmp_path}/two words'" for tool in ("python -m scripts.compare", "tensorboard --logdir")
    ]


def test_cells_that_failed_or_left_nothing_are_told(tmp_path: Path) -> None:
    failed = record("whole", status="failed", reason="RuntimeError: no\nmore")
    cells = [cell(failed, tmp_path, "a", exit_code=1), cell(None, tmp_path, "b", exit_code=-9)]
    lines = summary(cells, tmp_path, planned=3)
    assert row_of(lines, "a") == ["a", "failed"]
    assert row_of(lines, "b") == ["b", "killed", "(SIGKILL)"]
    assert "a: RuntimeError: no" in lines
    assert "stopped after 2 of 3 cells" in lines


def test_inferences_have_columns_of_their_own_and_are_compared_by_batches(tmp_path: Path) -> None:
    def inferred(label: str, milliseconds: float, **figures: Any) -> list[RunRecord]:
        rate = 1e3 / milliseconds
        seconds = {f"latency_seconds_{name}": milliseconds / 1e3 for name in ("median", "p95")}
        return turns(
            label,
            *[0.0] * 3,
            run="inference",
            batches_per_second=rate,
            samples_per_second=32 * rate,
            **seconds,
            **figures,
        )

    whole = inferred("whole", 5.0, warmup_seconds=21.0, compile_seconds=20.0)
    lines = summary([*named([*inferred("eager", 10.0), *whole], tmp_path), cell(EAGER, tmp_path, "trained")], tmp_path)
    assert "steps/s" in " ".join(lines[:3])
    assert any("batches" in line for line in lines[3:])
    assert row_of(lines, "eager-1")[2:6] == ["10.0", "10.0", "3,200", "1"]
    assert row_of(lines, "whole-1")[2:7] == ["5.00", "5.00", "6,400", "2.00x", "4,000"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_long_names_is_one_table_that_fits(tmp_path: Path, width: int) -> None:
    records = [
        *turns("eager", 10.0, 10.0, compile_seconds=None, final_loss=0.5),
        *turns("whole", 20.0, 20.0, compile_seconds=30.0, final_loss=0.5),
    ]
    overrides = ["compile=[cached,buckets,regional,optimizer,cuda_graph]", "task.data.batch_size=64"]
    cells = [cell(one, tmp_path, *overrides, f"round={one.round}") for one in records]
    lines = summary(cells, tmp_path, width=width)
    assert max(len(line) for line in lines[:-4]) <= width
    assert sum("steps/s" in line for line in lines) == 1
