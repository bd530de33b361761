"""What a sweep says at its end: the comparison of its runs, and every cell that did not finish."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.report.runs import Run
from trainer.sweep.launcher import summarize
from trainer.telemetry.record import RunRecord


def record(label: str, **figures: Any) -> RunRecord:
    return RunRecord(task="toy", **{"label": label, "status": "finished", **figures})


def summary(records: list[RunRecord], directory: Path, *, planned: int | None = None) -> list[str]:
    runs = [Run(directory, one) for one in records]
    console = Console(file=io.StringIO(), width=200)
    summarize(runs, planned=planned or len(runs), sweep_dir=directory, console=console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row_of(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(f"  {name} "))


def turns(label: str, *rates: float, **figures: Any) -> list[RunRecord]:
    figures = {"warmup_seconds": 1.0, "start": "cold", **figures}
    return [
        record(label, steady_steps_per_second=rate, round=number, **figures) for number, rate in enumerate(rates, 1)
    ]


def test_the_comparison_and_the_commands_for_more(tmp_path: Path) -> None:
    records = [*turns("eager", 10.0, 10.0, 10.0), *turns("whole", 20.0, 20.0, 20.0, warmup_seconds=31.0)]
    lines = summary(records, tmp_path / "two words")
    assert row_of(lines, "whole")[3:6] == ["2.00x", "2.00-2.00", "31.0"]
    assert row_of(lines, "whole")[6] == "600"
    assert "  verdict: for fewer than 600 steps use eager; above, whole" in lines
    assert lines[-2:] == [
        f"{tool} '{tmp_path}/two words'" for tool in ("python -m scripts.compare", "tensorboard --logdir")
    ]


def test_cells_that_failed_are_told_once(tmp_path: Path) -> None:
    failed = record("whole", status="failed", reason="RuntimeError: no\nmore")
    lines = summary([failed], tmp_path, planned=3)
    assert [line.strip() for line in lines if "RuntimeError" in line] == [
        f"whole: failed: RuntimeError: no ({tmp_path})"
    ]
    assert "stopped after 1 of 3 cells" in lines
