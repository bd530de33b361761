"""The process of a cell: one whose time is up is asked to stop, and killed with its group where it does not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.sweep import processes as cell_process
from trainer.sweep.plan import Entry, PlannedCell
from trainer.sweep.processes import CellProcess
from trainer.telemetry.record import RunRecord

CELL = """
import signal, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(100)
"""


class Started:
    """A cell that has ten seconds, 30 more to stop, and does nothing but to wait."""

    def __init__(self, directory: Path, manner: str) -> None:
        self.cell = cell = PlannedCell(entry=Entry(overrides=["seed=1"]), arm=(), job=0, record=RunRecord(task="toy"))
        cell.directory = directory / "cell"
        cell.command = [sys.executable, "-S", "-c", CELL, str(directory / "waits"), manner]
        self.process = CellProcess(cell, {}, 10.0, [])
        self._running = self.process.run(lambda **_: None)
        deadline = time.monotonic() + 200
        while not (directory / "waits").exists():
            self.look()
            assert time.monotonic() < deadline, "it never began"

    def look(self) -> None:
        time.sleep(0.01)
        next(self._running, None)

    def wait(self) -> RunRecord:
        deadline = time.monotonic() + 200
        while self.cell.exit_code is None:
            assert time.monotonic() < deadline, "it never ended"
            self.look()
        return self.cell.record


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock by which cells are given up."""
    watch = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(cell_process, "time", SimpleNamespace(monotonic=lambda: watch.seconds))
    return watch


GIVEN_UP = ("failed", "given up after 10 s, the longest that a cell was to take")


def test_a_cell_whose_time_is_up_is_asked_to_stop(watch: SimpleNamespace, tmp_path: Path) -> None:
    cell = Started(tmp_path, "hearing")
    watch.seconds = 9.9
    cell.look()
    assert cell.cell.exit_code is None
    watch.seconds = 10.0
    record = cell.wait()
    assert (record.status, record.reason) == GIVEN_UP
    assert (cell.cell.exit_code, cell.process.seconds) == (-15, 10.0)


def test_one_that_does_not_hear_is_killed_after_a_grace(watch: SimpleNamespace, tmp_path: Path) -> None:
    cell = Started(tmp_path, "deaf")
    for watch.seconds in (10.0, 40.0):
        cell.look()
        assert cell.cell.exit_code is None
    watch.seconds = 40.1
    record = cell.wait()
    assert (record.status, record.reason) == GIVEN_UP
    assert cell.cell.exit_code == -9
