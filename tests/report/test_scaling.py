"""Runs on several numbers of devices: efficiency against one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import compare
from scripts.report import main as report
from tests.report.records import record, save
from trainer.report.runs import Run
from trainer.report.tables import Columns, scalings
from trainer.telemetry.record import RunRecord


def on(devices: int, step_seconds: float, *, how: str = "ddp", batch_size: int = 32, **changes: Any) -> RunRecord:
    """A run of ``batch_size`` samples a step and device."""
    one = record("regional", step_seconds=step_seconds, batch_size=batch_size, **changes)
    one.world_size = devices
    one.config["trainer"] |= {"devices": devices, "strategy": how if devices > 1 else "auto"}
    one.samples_per_second = devices * batch_size / step_seconds
    return one


def scaled(*records: RunRecord) -> list[Columns]:
    return [table for _, table in scalings([Run(Path(f"run{number}"), one) for number, one in enumerate(records)])]


def rounds() -> list[RunRecord]:
    """A machine that is slower in the second round, for one device and for several."""
    return [
        on(devices, step * pace, round=number, how=how)
        for number, pace in ((1, 1.0), (2, 1.2))
        for devices, how, step in ((1, "ddp", 0.1), (2, "ddp", 0.125), (2, "fsdp2", 0.2))
    ]


def test_efficiency_is_of_the_round_and_beside_the_same_strategies() -> None:
    (found,) = scaled(*rounds(), record("eager"))
    assert found["arm"] == ["1 device", "2 devices ddp", "2 devices fsdp2"]
    assert [text.split()[0] for text in found["efficiency"]] == ["1.00", "0.800", "0.500"], "without the rounds' pace"
    assert found["samples a step"] == ["32.0", "64.0", "64.0"], "weak scaling"
    (strong,) = scaled(on(1, 0.1), on(2, 0.06, batch_size=16))
    assert strong["samples a step"] == ["32.0", "32.0"]


def test_without_one_device_there_is_no_efficiency() -> None:
    (found,) = scaled(on(2, 0.1), on(4, 0.1))
    assert "efficiency" not in found


def test_other_strategies_boards_failed_runs_and_one_number_of_devices_are_no_scaling() -> None:
    other = record("eager")
    other.world_size = 2
    assert scaled(on(1, 0.1), other) == []
    assert scaled(on(1, 0.1), on(2, 0.1, status="failed")) == []
    assert scaled(on(2, 0.1), on(2, 0.1, how="fsdp2")) == []
    assert scaled(on(1, 0.1), on(2, 0.1, device="NVIDIA A100")) == []


def test_compare_and_the_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = str(save(rounds(), tmp_path / "runs"))
    assert compare.main([folder]) == 0
    said = capsys.readouterr().out
    assert "scaling: captioning · regional" in said
    assert "2 devices ddp" in said
    assert compare.main([folder, "--markdown"]) == 0
    assert "| 2 devices fsdp2 | 2 | 64.0 |" in capsys.readouterr().out
    assert report([folder, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Scaling: captioning" in page
