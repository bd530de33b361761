"""The ``summary`` run of a sweep: what TensorBoard finds in it, and that a sweep never fails for want of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.instant_cells import InstantCells
from tests.report.records import ragged, record, save, static
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import find
from trainer.sweep import launcher
from trainer.sweep.sweep import FOLDER, write, write_summary


def events_in(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return events


def page(events: EventAccumulator) -> str:
    (text,) = events.Tensors("comparison/tables")
    return str(text.tensor_proto.string_val[0].decode())


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two workloads, and their summary."""
    directory = save([*static(rounds=1), *ragged()], tmp_path_factory.mktemp("sweep"))
    assert write_summary(directory) is None
    return directory


def test_it_holds_verdicts_and_tables(sweep: Path) -> None:
    events = events_in(sweep / FOLDER)
    text = page(events)
    compared = compare(find([sweep]))
    for found in compared:
        assert found.verdict in text.replace("\\", "")
        for row in found.rows:
            assert f"| {row.cell.arm} |" in text


def test_each_run_gets_its_speed_to_eager(sweep: Path) -> None:
    for found in compare(find([sweep])):
        for row in found.rows:
            for run in row.cell.finished:
                (point,) = events_in(run.directory).Scalars("whole_run/speed_to_eager")
                assert point.value == pytest.approx(1.0 if row.ratio is None else row.ratio.value)


def test_a_later_comparison_replaces_the_one_before(tmp_path: Path) -> None:
    for records in (static(rounds=1), ragged()):
        folder = save(records, tmp_path / str(len(records)))
        write(compare(find([folder])), tmp_path / "log")
    text = page(events_in(tmp_path / "log"))
    assert "buckets" in text
    assert "reduce-overhead" not in text


def test_where_nothing_can_be_compared_there_is_no_summary(tmp_path: Path) -> None:
    folder = save([record("eager"), record("eager", seed=1)], tmp_path / "runs")
    assert write_summary(folder) is None
    assert not (folder / FOLDER).exists()


def test_what_cannot_be_written_is_said_and_fails_nothing(tmp_path: Path) -> None:
    assert write_summary(tmp_path) == f"no summary for TensorBoard: {tmp_path}: no record.json in it or below"
    folder = save(static(rounds=1), tmp_path / "runs")
    (folder / FOLDER).write_text("in the way")
    assert (write_summary(folder) or "").startswith("no summary for TensorBoard: ")


def test_a_sweep_ends_with_its_summary(command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    InstantCells(monkeypatch)
    monkeypatch.setattr(launcher, "write_summary", write_summary)  # which it leaves out
    assert command_line("-m", "hydra.sweep.dir=sweep", "compile=eager,whole") == 0
    assert "| whole |" in page(events_in(Path("sweep", FOLDER)))


def test_it_needs_no_torch(sweep: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.sweep.sweep import write_summary; "
        f"assert write_summary(Path({str(sweep)!r})) is None; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'lightning', 'hydra', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=200).returncode == 0
