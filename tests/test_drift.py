"""``python -m scripts.drift``: baselines made and compared with, what it refuses, exit codes, and stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import drift as script
from tests.conftest import ROOT, STAND_IN
from tests.evidence.records import record, save
from trainer.evidence.machines import this_fingerprint

HOST = "AMD EPYC 9654"


def night(directory: Path, rate: float, *, host: str = HOST, graphs: int = 8) -> str:
    """Three rounds of eager and of regional at ``rate`` steps a second beside eager's 10, with 1% of noise."""
    records = []
    for turn, pace in ((1, 1.0), (2, 1.01), (3, 0.99)):
        for arm, step in (("eager", 0.1), ("regional", pace / rate)):
            one = record(arm, step_seconds=step, warmup_seconds=20.0, round=turn, start="cold", processor=host)
            one.command = ["experiment=gpt2", f"compile={arm}"]
            if one.graphs is not None:
                one.graphs = graphs
            records.append(one)
    return str(save(records, directory))


@pytest.fixture
def baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Arguments for a baseline in which regional is 1.5 times as fast as eager."""
    arguments = ["--baseline", str(tmp_path / "drift.json")]
    assert script.main([*arguments, "--update", "--from", night(tmp_path / "first", 15.0)]) == 0
    assert "1 row written for NVIDIA H200, AMD EPYC 9654, torch 2" in capsys.readouterr().out
    return arguments


@pytest.mark.parametrize(
    ("rate", "strict", "code", "said"),
    [
        (15.05, True, 0, "1 row: none moved"),
        (13.0, False, 1, "WORSE: experiment=gpt2 compile=regional: ratio 1.500x"),
        (18.0, False, 0, "better: experiment=gpt2 compile=regional: ratio 1.500x"),
        (18.0, True, 1, "1 row: 1 better"),
    ],
)
def test_exit_code_and_lines_say_what_moved(
    baseline: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rate: float,
    strict: bool,
    code: int,
    said: str,
) -> None:
    arguments = [*baseline, "--from", night(tmp_path / "second", rate), *(["--strict"] if strict else [])]
    assert script.main(arguments) == code
    assert said in capsys.readouterr().out


def test_a_graph_more_is_a_move_that_names_versions_and_commit(
    baseline: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*baseline, "--from", night(tmp_path / "second", 15.0, graphs=9), "compile=regional"]) == 1
    output = capsys.readouterr().out
    assert "WORSE: experiment=gpt2 compile=regional: graphs 8 -> 9" in output
    assert "since measured on 2026-11-21: neither versions nor commit changed" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--from", "{other}"],
            "for this machine (NVIDIA H200, Another, torch 2, triton 3, cuda 13); it has",
        ),
        (["--from", "{same}", "experiment=bert"], "no such row in "),
        (["--from", "nowhere"], "nowhere: no such file or folder"),
        ([], "has no baseline for this machine"),
        (["--update", "experiment=gpt2"], "--update of new rows needs a workload and arms"),
        (["--update", "compile=regional"], "--update of new rows needs a workload and arms"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    baseline: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if "{other}" in arguments or "{same}" in arguments:
        folder = night(tmp_path / "second", 15.0, host="Another" if "{other}" in arguments else HOST)
        arguments = [folder if word.startswith("{") else word for word in arguments]
    assert script.main([*baseline, *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert said in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["outputs"], "'outputs' is not an override (name=value); records are named with --from"),
        (["compile.whole.mode=x"], "belongs to an arm: --arm 'whole compile.whole.mode=x'"),
    ],
)
def test_wrong_arguments_are_told_with_the_right_ones(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--baseline", "drift.json", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_runs_with_nothing_but_eager_make_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save([record("eager", processor=HOST)], tmp_path / "runs"))
    assert script.main(["--baseline", str(tmp_path / "drift.json"), "--update", "--from", folder]) == 2
    assert "nothing but eager" in capsys.readouterr().err


def test_values_with_commas_are_several_rows() -> None:
    words = ["experiment=gpt2,resnet50", "compile=[regional,buckets],whole", "--arm", "whole  compile.whole.mode=x"]
    options = script.parse(["--baseline", "x", *words])
    workloads, arms = script.asked(options)
    assert workloads == [["experiment=gpt2"], ["experiment=resnet50"]]
    assert arms == ["whole compile.whole.mode=x", "[regional,buckets]", "whole"]


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(ROOT)])}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "scripts.drift",
            "--baseline",
            "drift.json",
            "--out",
            "runs",
            "--rounds",
            "1",
            *arguments,
        ],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_it_runs_the_arms_in_turns_with_eager_and_writes_what_they_came_to(tmp_path: Path) -> None:
    process = start(tmp_path, "--update", "experiment=smoke", "compile=whole", "trainer.max_steps=7")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "[1/1] experiment=smoke trainer.max_steps=7: eager, whole · rounds 1" in output
    assert f"drift.json: 1 row written for {this_fingerprint()}" in output
    ((machine, (row,)),) = script.baselines.load(tmp_path / "drift.json").items()
    assert machine == this_fingerprint()
    assert (row.workload, row.arm) == (["experiment=smoke", "trainer.max_steps=7"], "whole")
    assert row.ratio is not None
    assert row.ratio.median == 2.0, "what the stand-in says"
    cold = [one.record.start for one in script.find([tmp_path / "runs"])]
    assert cold == ["cold", "cold"]


def test_ctrl_c_stops_the_run_and_compares_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "--update", "experiment=smoke", "compile=whole", "seed=5")
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/1/*/waiting")):
        assert time.monotonic() < deadline, "no run ever began"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal's group
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "stopped; nothing was compared"
    assert "Traceback" not in output + errors
    assert not (tmp_path / "drift.json").exists()
    (waited,) = script.find([tmp_path / "runs"])
    assert waited.record.status == "interrupted", "the run itself was told"
