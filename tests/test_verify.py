"""``python -m scripts.verify``: rows that are there, what is run again, and what it says of the outcome."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import verify
from tests.report.records import record
from tests.report.test_published import on_disk, sweep
from tests.sweep import MARK
from trainer.report.published import publish, rows_of
from trainer.report.runs import Run
from trainer.telemetry.record import RunRecord


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A file of one workload, ``row``."""
    folder = tmp_path / "records"
    publish([on_disk(tmp_path / "published", sweep())], folder / "row.jsonl")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, records: Path, here: list[RunRecord], *more: str) -> tuple[int, list[str]]:
    """The exit code of a verification whose sweep leaves ``here``, and the sweep's arguments."""
    started: list[list[str]] = []
    out = records.parent / "here"

    def sweep_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        shutil.rmtree(out, ignore_errors=True)
        on_disk(out, here)
        return subprocess.CompletedProcess(command, int(any(one.status == "failed" for one in here)))

    monkeypatch.setattr(verify.subprocess, "run", sweep_process)
    monkeypatch.setattr(verify, "has_gpu", lambda: True)
    code = verify.main(["row/regional", "--records", str(records), "--out", str(out), *more])
    return code, started[0][3:]


def test_the_published_command_is_run_again_in_rounds(monkeypatch: pytest.MonkeyPatch, records: Path) -> None:
    _, command = run(monkeypatch, records, sweep(), "--rounds", "2")
    assert command == [
        "-m",
        f"sweep={records.parent / 'here'}",
        "task=captioning",
        "task.data.batch_size=32",
        'hydra.launcher.arms=["eager","[regional]"]',
        "hydra.launcher.rounds=2",
        "hydra.launcher.caches=shared",
    ]


def test_a_row_of_a_gpu_is_not_trained_without_one(
    monkeypatch: pytest.MonkeyPatch, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "has_gpu", lambda: False)
    monkeypatch.setattr(verify.subprocess, "run", None)
    assert verify.main(["row/regional", "--records", str(records)]) == 2
    assert "row/regional is from NVIDIA H200, and no GPU is here" in capsys.readouterr().err


def test_what_holds_and_what_does_not_is_said(
    monkeypatch: pytest.MonkeyPatch, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, records, sweep())
    text = capsys.readouterr().out
    assert code == 0
    assert "row/regional: all 6 figures that can be compared hold here" in text
    assert "published: NVIDIA H200 · 16 processors · torch 2.11.0" in text

    code, _ = run(monkeypatch, records, sweep(graphs=9, final_loss=0.6, device="NVIDIA A100"))
    text = capsys.readouterr().out
    assert code == 1
    assert "graphs, final loss of 5 figures do not hold here" in text
    assert re.search(r"ms a step .* not compared", text), "on another GPU"


def test_an_arm_that_fails_here_has_not_been_verified(
    monkeypatch: pytest.MonkeyPatch, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, records, [record("eager"), record("regional", status="failed", reason="no GPU")])
    assert code == 1
    assert "did not run to its end" in capsys.readouterr().out


def test_rows_are_listed_and_others_refused(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--list", "--records", str(records)]) == 0
    assert "1.23 (1.20 to 1.25) times eager" in next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("row/regional")
    )
    assert verify.main(["row/whole", "--records", str(records)]) == 2
    assert "'row/whole' is not a row of crucible verify --list" in capsys.readouterr().err
    assert verify.main(["--list", "--records", str(records / "none")]) == 2


@MARK
def test_every_published_row_can_be_run_again(edge: None, tmp_path: Path) -> None:
    from trainer.config import compose

    rows = verify.published_rows(verify.RECORDS)
    for name, row in rows.items():
        base = verify.base_of(name, rows)
        arguments = verify.sweep_arguments(row, base, rounds=1, out=tmp_path)
        shared = [word for word in arguments[2:] if not word.startswith("hydra.")]
        first, *more = verify.arm_of(row, shared).split()
        assert compose([*shared, f"compile={first}", *more]).trainer.max_steps > 0, name


def test_what_an_arm_sets_beside_its_strategies_is_the_arms(tmp_path: Path) -> None:
    eager, other = record("eager"), record("whole mode=reduce-overhead")
    other.command += ["run=peer", "repeat=cold"]
    base, row = rows_of([Run(tmp_path, eager), Run(tmp_path, other)])
    arguments = verify.sweep_arguments(row, base, rounds=1, out=tmp_path)
    arm = "[whole] compile.whole.mode=reduce-overhead run=peer"
    assert arguments[2:5] == [*eager.command[:2], f'hydra.launcher.arms=["eager","{arm}"]']


def test_runs_kept_in_a_folder_of_ones_own_have_no_pages_to_be_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_disk(tmp_path / "runs", sweep())
    page = tmp_path / "README.md"
    page.write_text("![](pictures/mine-throughput.png)")
    for folder in ("kept", "outputs/kept"):
        assert verify.main(["--publish", "mine", "--records", folder, "runs"]) == 0
        assert capsys.readouterr().out == f"{folder}/mine.jsonl: 6 records\n"
    assert not list(tmp_path.rglob("*.png"))
