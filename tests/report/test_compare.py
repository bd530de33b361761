"""``crucible compare``: what it prints, and which figures of earlier runs hold (``--against RUN``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compare import main
from scripts.report import main as report
from tests.conftest import ROOT
from tests.report.records import record, save, static
from tests.report.scenarios import SCALED
from trainer.report.published import publish
from trainer.telemetry.machine_monitor import MachineFacts


def night(directory: Path, rate: float, *, graphs: int = 8, arm: str = "regional", rounds: int = 3) -> str:
    """Rounds of eager and of an arm at ``rate`` steps a second beside eager's 10, with 1% of noise."""
    records = []
    for turn, pace in ((1, 1.0), (2, 1.01), (3, 0.99))[:rounds]:
        for label, step in (("eager", 0.1), (arm, pace / rate)):
            one = record(label, step_seconds=step, warmup_seconds=20.0, round=turn, start="cold")
            one.command = ["experiment=gpt2", f"compile={label}", "trainer.max_steps=9", f"compile.{label}.x=1"]
            one.graphs = None if one.graphs is None else graphs
            records.append(one)
    return str(save(records, directory))


@pytest.fixture
def reference(tmp_path: Path) -> list[str]:
    """Arguments for runs in which regional is 1.5 times as fast as eager."""
    return ["--against", night(tmp_path / "first", 15.0)]


@pytest.mark.parametrize(
    ("rate", "graphs", "code", "said"),
    [
        (15.05, 8, 0, "captioning regional: all 7 figures that can be compared hold here"),
        (13.0, 8, 1, "captioning regional: over eager, ms a step of 7 figures do not hold here"),
        (18.0, 8, 0, "all 7 figures that can be compared hold here or are better: over eager, ms a step"),
        (15.0, 9, 1, "captioning regional: graphs of 7 figures does not hold here"),
    ],
)
def test_exit_code_and_lines_say_what_moved(
    reference: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rate: float,
    graphs: int,
    code: int,
    said: str,
) -> None:
    assert main([night(tmp_path / "second", rate, graphs=graphs), *reference]) == code
    assert said in capsys.readouterr().out


def test_runs_of_no_arm_of_the_file_are_refused_and_a_missing_one_is_named(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record("eager", task="another")
    assert main([str(save([other], tmp_path / "third")), *reference]) == 2
    assert "none of these runs is of an arm of --against" in capsys.readouterr().err
    night(tmp_path / "first" / "more", 15.0, arm="whole")
    assert main([night(tmp_path / "second", 15.0), *reference]) == 0
    assert "captioning whole: not measured" in capsys.readouterr().out


def test_published_records_are_runs_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish([night(tmp_path / "first", 15.0)], tmp_path / "kept.jsonl")
    assert main([night(tmp_path / "second", 15.0), "--against", str(tmp_path / "kept.jsonl")]) == 0
    assert "captioning regional: all 7 figures" in capsys.readouterr().out


def test_an_arm_that_failed_does_not_hold(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record("eager"), record("regional", status="failed")]
    assert main([str(save(records, tmp_path / "failed")), *reference]) == 1
    assert "captioning regional: failed" in capsys.readouterr().out


def test_the_ratio_of_a_busy_machine_or_of_a_single_round_is_not_judged(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([night(tmp_path / "second", 13.0, rounds=1), *reference])
    assert "captioning regional: ms a step of 6 figures does not hold here" in capsys.readouterr().out
    machine = MachineFacts(seconds=9.0, processors=2, load_average=10.0, other_processors=1.5, waited_share=0.6)
    records = [
        record(label, machine=machine if label == "eager" else None, round=turn, warmup_seconds=20.0, start="cold")
        for turn in (1, 2, 3)
        for label in ("eager", "regional")
    ]
    main([str(save(records, tmp_path / "busy")), *reference])
    assert "captioning regional: ms a step of 6 figures does not hold here" in capsys.readouterr().out


def test_a_peer_of_a_later_version_is_the_same_arm_and_the_versions_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, version, step in (("first", "1.15.0", 0.1), ("second", "1.16.0", 0.2)):
        peer = {"name": "peer", "arm": "accelerate_regional", "accelerate": version, "backend": "inductor"}
        one = record("eager", strategies=[peer], label="peer accelerate_regional", step_seconds=step, graphs=8)
        one.versions["accelerate"] = version
        save([record("eager"), one], tmp_path / folder)
    assert main([str(tmp_path / "second"), "--against", str(tmp_path / "first")]) == 1
    said = capsys.readouterr().out
    assert "captioning peer accelerate_regional: ms a step of 3 figures does not hold here" in said
    assert "accelerate: 1.15.0 (1 run), 1.16.0 (1 run)" in said


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(static(), tmp_path_factory.mktemp("sweep"))


def test_a_sweep_comes_to_a_table_and_a_verdict(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--steps", "700"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert "verdict: for fewer than " in text


def test_markdown_and_json_are_printed_in_the_place_of_tables(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["workload"] == "captioning"
    assert main([str(sweep), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## captioning\n")


def test_runs_on_several_numbers_of_devices_are_a_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = str(save(next(iter(SCALED.values())), tmp_path / "runs"))
    assert main([folder]) == 0
    said = capsys.readouterr().out
    assert "scaling: captioning · regional" in said
    assert "2 devices ddp" in said
    assert main([folder, "--markdown"]) == 0
    assert "| 2 devices fsdp2 | 2 | 64.0 |" in capsys.readouterr().out
    assert report([folder, "-o", str(tmp_path / "page.html")]) == 0
    assert "Scaling: captioning" in (tmp_path / "page.html").read_text()


def test_a_reader_that_closes_early_is_no_error(sweep: Path) -> None:
    command = [sys.executable, "-m", "scripts.compare", str(sweep), "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=200, check=False)
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")
