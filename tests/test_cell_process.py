"""The process of a cell: one whose time is up is asked to stop, and killed with its group where it does not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.sweep import processes as cell_process
from trainer.sweep.plan import PlannedCell
from trainer.sweep.processes import CellEnd, CellProcess
from trainer.telemetry.record import RunRecord

CELL = """
import signal, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(100)
"""


def started(directory: Path, manner: str) -> CellProcess:
    """A cell that has ten seconds, 30 more to stop, and does nothing but to wait."""
    cell = PlannedCell(overrides=("seed=1",), arm=(), job=0, start=None, described=RunRecord(task="toy"))
    cell.directory = directory / "cell"
    cell.command = [sys.executable, "-S", "-c", CELL, str(directory / "waits"), manner]
    process = CellProcess(cell=cell, timeout_seconds=10.0)
    process.start()
    deadline = time.monotonic() + 200
    while not (directory / "waits").exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.01)
    return process


def ended(process: CellProcess) -> CellEnd:
    deadline = time.monotonic() + 200
    while (end := process.poll()) is None:
        assert time.monotonic() < deadline, "it never ended"
        time.sleep(0.01)
    return end


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock by which cells are given up."""
    watch = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(cell_process, "time", SimpleNamespace(monotonic=lambda: watch.seconds))
    return watch


def test_a_cell_whose_time_is_up_is_asked_to_stop(watch: SimpleNamespace, tmp_path: Path) -> None:
    process = started(tmp_path, "hearing")
    watch.seconds = 9.9
    assert process.poll() is None
    watch.seconds = 10.0
    end = ended(process)
    assert (end.exit_code, end.seconds) == (-15, 10.0)
    assert (end.record.status, end.record.reason) == (
        "failed",
        "given up after 10 s, the longest that a cell was to take",
    )


def test_one_that_does_not_hear_is_killed_after_a_grace(watch: SimpleNamespace, tmp_path: Path) -> None:
    process = started(tmp_path, "deaf")
    for watch.seconds in (10.0, 40.0):
        assert process.poll() is None
    watch.seconds = 40.1
    end = ended(process)
    assert end.exit_code == -9
    assert (end.record.status, end.record.reason) == (
        "failed",
        "given up after 10 s, the longest that a cell was to take",
    )
