"""``crucible drift``: references made and compared with, what it refuses, and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import compare
from scripts.drift import main
from tests.report.records import record, save

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
def reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Arguments for a reference in which regional is 1.5 times as fast as eager."""
    arguments = ["--against", str(tmp_path / "drift.json")]
    assert main([night(tmp_path / "first", 15.0), *arguments, "--update"]) == 0
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
    reference: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rate: float,
    strict: bool,
    code: int,
    said: str,
) -> None:
    arguments = [night(tmp_path / "second", rate), *reference, *(["--strict"] if strict else [])]
    assert main(arguments) == code
    assert said in capsys.readouterr().out


def test_a_graph_more_is_a_move_that_names_versions_and_commit(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([night(tmp_path / "second", 15.0, graphs=9), *reference]) == 1
    output = capsys.readouterr().out
    assert "WORSE: experiment=gpt2 compile=regional: graphs 8 -> 9" in output
    assert "since measured on 2026-11-21: neither versions nor commit changed" in output


def test_runs_of_another_machine_are_not_compared(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([night(tmp_path / "second", 15.0, host="Another"), *reference]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert "machine of these runs (NVIDIA H200, Another, torch 2, triton 3, cuda 13); it has NVIDIA H200, AMD" in errors
    assert f"make one: crucible drift RUNS {' '.join(reference)} --update" in errors


def test_a_row_that_was_not_run_is_reported(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [record(arm, processor=HOST, start="cold") for arm in ("eager", "whole")]
    for one in other:
        one.command = ["experiment=bert", f"compile={one.label}"]
    folder = str(save(other, tmp_path / "other"))
    assert main([folder, *reference]) == 2
    assert f"none of these runs is of a row of {reference[1]}" in capsys.readouterr().err
    assert main([folder, *reference, "--update"]) == 0
    assert main([folder, *reference]) == 0
    assert "not measured: experiment=gpt2 compile=regional" in capsys.readouterr().out
    assert main([folder, *reference, "--strict"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "much"], "argument --tolerance: 'much' is not a number"),
        (["--against", "drift.json", "--tolerance", "-1"], "argument --tolerance: -1 must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_with_nothing_but_eager_make_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save([record("eager", processor=HOST)], tmp_path / "runs"))
    assert main([folder, "--against", str(tmp_path / "drift.json"), "--update"]) == 2
    assert "nothing but eager" in capsys.readouterr().err


def test_the_option_that_compare_had_for_it_still_works(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([night(tmp_path / "second", 13.0), *reference]) == 1
    said, warned = capsys.readouterr()
    assert "WORSE: experiment=gpt2 compile=regional" in said
    assert warned == "compare --against is crucible drift --against now\n"
