"""What a sweep leaves in TensorBoard: each run's speed to eager, and that a sweep never fails for want of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.instant_cells import InstantCells
from tests.report.records import ragged, save, static
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import find
from trainer.sweep import launcher
from trainer.sweep.sweep import write_speeds


def speed_in(directory: Path) -> float:
    events = EventAccumulator(str(directory))
    events.Reload()
    (point,) = events.Scalars("whole_run/speed_to_eager")
    return float(point.value)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two workloads, compared twice: the later comparison replaces the one before."""
    directory = save([*static(rounds=1), *ragged()], tmp_path_factory.mktemp("sweep"))
    assert (write_speeds(directory), write_speeds(directory)) == (None, None)
    return directory


def test_each_run_gets_its_speed_to_eager(sweep: Path) -> None:
    found = [(run, row.ratio) for one in compare(find([sweep])) for row in one.rows for run in row.cell.finished]
    assert len(found) > 4
    for run, ratio in found:
        assert speed_in(run.directory) == pytest.approx(1.0 if ratio is None else ratio.value)


def test_what_cannot_be_written_is_said_and_fails_nothing(tmp_path: Path) -> None:
    assert write_speeds(tmp_path) == f"no speed to eager for TensorBoard: {tmp_path}: no record.json in it or below"


def test_a_sweep_ends_with_it(command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    InstantCells(monkeypatch)
    monkeypatch.setattr(launcher, "write_speeds", write_speeds)  # which it leaves out
    assert command_line("-m", "hydra.sweep.dir=sweep", "compile=eager,whole") == 0
    assert {speed_in(run.directory) for run in find([Path("sweep")])} == {1.0, 4.0}


def test_it_needs_no_torch(sweep: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.sweep.sweep import write_speeds; "
        f"assert write_speeds(Path({str(sweep)!r})) is None; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'lightning', 'hydra', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=200).returncode == 0
