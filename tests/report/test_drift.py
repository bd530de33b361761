"""``crucible compare --against RUN``: what counts as moved since these runs, what is refused, and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import compare
from scripts.compare import TOLERANCE, drift, main
from tests.report.records import record, save
from trainer.report.comparison import Row
from trainer.report.published import publish
from trainer.report.runs import Cell, Run
from trainer.report.statistics import Ratio
from trainer.telemetry.machine import MachineFacts

HOST = "AMD EPYC 9654"


CELL = Cell(workload="captioning", arm="regional")


def row(*, low: float | None = 1.48, high: float | None = 1.52, value: float | None = 1.5, **counts: Any) -> Row:
    ratio = None if value is None else Ratio(value, low, high, 3, "faster")
    return Row(cell=CELL, ratio=ratio, **counts)


def verdict(before: Row, now: Row, tolerance: float = TOLERANCE) -> str:
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
    """Arguments for runs in which regional is 1.5 times as fast as eager."""
    return ["--against", night(tmp_path / "first", 15.0)]


@pytest.mark.parametrize(
    ("rate", "graphs", "code", "said"),
    [
        (15.05, 8, 0, "1 arm: none moved"),
        (13.0, 8, 1, "WORSE: captioning regional: ratio 1.500x (1.463 to 1.538) -> 1.300x"),
        (18.0, 8, 0, "better: captioning regional: ratio 1.500x"),
        (15.0, 9, 1, "WORSE: captioning regional: graphs 8 -> 9"),
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


def test_an_arm_that_was_not_run_is_reported(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night(tmp_path / "first" / "more", 15.0, arm="whole")
    assert main([night(tmp_path / "second", 15.0), *reference]) == 0
    assert "not measured: captioning whole\n2 arms: 1 not measured" in capsys.readouterr().out


def test_published_records_are_runs_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish([night(tmp_path / "first", 15.0)], tmp_path / "kept.jsonl")
    assert main([night(tmp_path / "second", 15.0), "--against", str(tmp_path / "kept.jsonl")]) == 0
    assert "1 arm: none moved" in capsys.readouterr().out


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
    value, low, high = now
    assert verdict(row(), row(value=value, low=low, high=high)) == expected
    if value == 1.40:
        assert verdict(row(), row(value=value, low=low, high=high), 0.07) == "same", "the tolerance is the user's"


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
    failed = Cell(workload="captioning", arm="regional", failed=[Run(Path(), record("regional"))] * 2)
    assert drift(row(), Row(cell=failed)) == [("WORSE", "2 of its runs failed")]


def test_the_ratio_of_a_busy_machine_is_not_judged(
    reference: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = MachineFacts(seconds=9.0, processors=2, load_average=10.0, other_processors=1.5, waited_share=0.6)
    slow = record("regional", step_seconds=0.09, machine=machine, processor=HOST, warmup_seconds=90.0, start="cold")
    records = [record("eager", processor=HOST), slow]
    for one in records:
        one.command = ["experiment=gpt2", f"compile={one.label}"]
    assert main([str(save(records, tmp_path / "busy")), *reference]) == 0
    assert "not judged: captioning regional: ratio: measured while the machine was busy" in (capsys.readouterr().out)
