"""``crucible compare --against FILE``: what counts as moved since ``--json FILE``, what is refused, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import compare
from scripts.compare import TOLERANCE, drift, main
from tests.report.records import record, save
from trainer.telemetry.machine import MachineFacts

HOST = "AMD EPYC 9654"


def row(**figures: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"ratio": 1.5, "ratio_low": 1.48, "ratio_high": 1.52, "flags": []}
    names = ("graphs", "graph_breaks", "recompiles")
    return {**dict.fromkeys(names), "runs_failed": 0, **given, **figures}


def span(name: str, value: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def verdict(before: dict[str, Any], now: dict[str, Any], tolerance: float = TOLERANCE) -> str:
    return compare.verdict(drift(before, now, tolerance))


def night(directory: Path, rate: float, *, host: str = HOST, graphs: int = 8, arm: str = "regional") -> str:
    """Three rounds of eager and of an arm at ``rate`` steps a second beside eager's 10, with 1% of noise."""
    records = []
    for turn, pace in ((1, 1.0), (2, 1.01), (3, 0.99)):
        for label, step in (("eager", 0.1), (arm, pace / rate)):
            one = record(label, step_seconds=step, warmup_seconds=20.0, round=turn, start="cold", processor=host)
            one.command = ["experiment=gpt2", f"compile={label}", "trainer.max_steps=9", f"compile.{label}.x=1"]
            one.graphs = None if one.graphs is None else graphs
            records.append(one)
    return str(save(records, directory))


@pytest.fixture
def reference(tmp_path: Path) -> list[str]:
    """Arguments for a file in which regional is 1.5 times as fast as eager."""
    file = tmp_path / "drift.json"
    assert main([night(tmp_path / "first", 15.0), "--json", str(file)]) == 0
    return ["--against", str(file)]


@pytest.mark.parametrize(
    ("rate", "graphs", "code", "said"),
    [
        (15.05, 8, 0, "1 arm: none moved"),
        (13.0, 8, 1, "WORSE: captioning experiment=gpt2 regional: ratio 1.500x (1.463 to 1.538) -> 1.300x"),
        (18.0, 8, 0, "better: captioning experiment=gpt2 regional: ratio 1.500x"),
        (15.0, 9, 1, "WORSE: captioning experiment=gpt2 regional: graphs 8 -> 9"),
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


def test_runs_of_another_machine_or_of_no_arm_of_the_file_are_refused(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([night(tmp_path / "second", 15.0, host="Another"), *reference]) == 2
    assert f"was measured on {HOST}, and these runs on Another" in capsys.readouterr().err
    assert main([night(tmp_path / "third", 15.0, arm="whole"), *reference]) == 2
    assert "none of these runs is of an arm of" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", '[{"rows": 1}]', '{"schema": 2}', None])
def test_a_file_that_is_none_of_ours_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "drift.json"
    if text is not None:
        file.write_text(text)
    assert main([night(tmp_path / "runs", 15.0), "--against", str(file)]) == 2
    said = "not what crucible compare --json writes" if text is not None else "--json"
    assert said in capsys.readouterr().err


def test_an_arm_that_was_not_run_is_reported(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(reference[1])
    kept = json.loads(file.read_text())
    kept[0]["rows"].append({**kept[0]["rows"][1], "arm": "whole"})
    file.write_text(json.dumps(kept))
    assert main([night(tmp_path / "second", 15.0), *reference]) == 0
    assert "not measured: captioning experiment=gpt2 whole\n2 arms: 1 not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ((1.40, 1.38, 1.42), "worse"),
        ((1.60, 1.58, 1.62), "better"),
        ((1.47, 1.469, 1.471), "same"),  # apart, but by 2% only
        ((1.30, 1.05, 1.55), "not judged"),  # 13%, but its noise reaches the ratio of then
        ((1.30, None, None), "not judged"),
        ((None, None, None), "worse"),  # eager did not finish
    ],
)
def test_a_ratio_moved_when_it_did_by_more_than_tolerance_and_both_noises(now: Any, expected: str) -> None:
    assert verdict(row(), row(**span("ratio", *now))) == expected
    if now[0] == 1.40:
        assert verdict(row(), row(**span("ratio", *now)), 0.07) == "same", "the tolerance is the user's"


@pytest.mark.parametrize(
    ("name", "before", "now", "expected"),
    [
        ("recompiles", 2, 3, "worse"),
        ("recompiles", 2, 1, "better"),
        ("graph_breaks", 0, 1, "worse"),
        ("graphs", 10, 9, "worse"),
        ("recompiles", 2, 2, "same"),
        ("recompiles", 2, None, "not judged"),
    ],
)
def test_counts_are_compared_exactly(name: str, before: Any, now: Any, expected: str) -> None:
    assert verdict(row(**{name: before}), row(**{name: now})) == expected


def test_an_arm_that_failed_is_worse() -> None:
    assert drift(row(), row(runs_failed=2)) == [("WORSE", "2 of its runs failed")]


def test_the_ratio_of_a_busy_machine_is_not_judged(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = MachineFacts(seconds=9.0, processors=2, load_average=10.0, other_processors=1.5, waited_share=0.6)
    slow = record("regional", step_seconds=0.09, machine=machine, processor=HOST, warmup_seconds=90.0, start="cold")
    records = [record("eager", processor=HOST), slow]
    for one in records:
        one.command = ["experiment=gpt2", f"compile={one.label}"]
    assert main([str(save(records, tmp_path / "busy")), *reference]) == 0
    assert "not judged: captioning experiment=gpt2 regional: ratio: measured while the machine was busy" in (
        capsys.readouterr().out
    )
