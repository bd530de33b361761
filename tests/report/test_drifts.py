"""What counts as moved between a reference and now, and reference files as people keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.records import record, static
from trainer.report.drift import Drift, Tolerances, drift
from trainer.report.reference import ReferenceRow, Span, fingerprint, identity, load, measured, merged, save
from trainer.report.runs import Run
from trainer.report.statistics import Ratio
from trainer.telemetry.machine import MachineFacts
from trainer.telemetry.record import RunRecord

HOST = "AMD EPYC 9654"


def row(*, arm: str = "regional", **figures: Any) -> ReferenceRow:
    figures = {"ratio": Span(1.5, 1.48, 1.52), **figures}
    return ReferenceRow(workload=["experiment=gpt2"], arm=arm, **figures)


def judged(before: ReferenceRow, now: ReferenceRow, **tolerances: float) -> Drift:
    return drift(before, now, Tolerances(**tolerances))


def as_runs(records: list[RunRecord]) -> list[Run]:
    return [Run(Path(str(number)), one) for number, one in enumerate(records)]


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (Span(1.40, 1.38, 1.42), "WORSE"),
        (Span(1.60, 1.58, 1.62), "better"),
        (Span(1.47, 1.469, 1.471), "same"),  # apart, but by 2% only
        (Span(1.30, 1.05, 1.55), "not judged"),  # 13%, but its noise reaches the baseline
        (Span(1.30), "not judged"),
        (None, "not judged"),
    ],
    ids=str,
)
def test_a_ratio_moved_when_it_did_by_more_than_tolerance_and_both_noises(now: Span | None, verdict: str) -> None:
    found = judged(row(), row(ratio=now))
    assert found.verdict == verdict
    assert found.worse == (verdict == "WORSE")


def test_times_of_a_busy_machine_are_not_judged(tmp_path: Path) -> None:
    machine = MachineFacts(seconds=9.0, processors=2, load_average=10.0, other_processors=1.5, waited_share=0.6)
    others: dict[str, Any] = {"warmup_seconds": 9.0, "start": "cold"}
    runs = [record("eager"), record("whole", step_seconds=0.09, machine=machine, **others)]
    (now,) = measured(as_runs(runs))
    assert now.busy is not None
    before = row(arm=now.arm, warmup_seconds=Span(1.0), counts={"graphs": 8})
    found = judged(before, now)
    assert (found.verdict, found.unknown) == ("not judged", [f"times: {now.busy}"])
    save({"here": [now]}, tmp_path / "reference.json")
    assert load(tmp_path / "reference.json")["here"][0].busy == now.busy, "nor is what comes later, against these"
    now.counts["graphs"] = 9
    assert judged(before, now).verdict == "WORSE", "counts are the same whatever else runs"


def test_the_tolerance_is_the_users(tmp_path: Path) -> None:
    slower = row(ratio=Span(1.40, 1.38, 1.42))
    assert judged(row(), slower, ratio=0.07).verdict == "same"
    assert judged(row(), slower, ratio=0.06).verdict == "WORSE"


def test_warm_up_and_memory_are_worse_when_they_grow() -> None:
    before = row(warmup_seconds=Span(20.0, 19.0, 21.0), peak_device_memory_gib=Span(8.0, 8.0, 8.0))
    slow = judged(before, row(warmup_seconds=Span(30.0, 29.0, 31.0), peak_device_memory_gib=Span(8.0, 8.0, 8.0)))
    assert [(move.what, move.worse) for move in slow.moves] == [("warm-up", True)]
    assert str(slow.moves[0]) == "warm-up 20.0 s (19.0 to 21.0) -> 30.0 s (29.0 to 31.0)"
    small = judged(before, row(warmup_seconds=Span(20.0), peak_device_memory_gib=Span(7.0, 7.0, 7.0)))
    assert [(move.what, move.worse) for move in small.moves] == [("peak memory", False)]
    quick = row(warmup_seconds=Span(0.5, 0.5, 0.5))
    assert judged(quick, row(warmup_seconds=Span(1.2, 1.2, 1.2))).verdict == "same", "less than a second"


@pytest.mark.parametrize(
    ("name", "before", "now", "verdict"),
    [
        ("recompiles", 2, 3, "WORSE"),
        ("recompiles", 2, 1, "better"),
        ("graph_breaks", 0, 1, "WORSE"),
        ("graphs", 10, 9, "WORSE"),
        ("cache_misses", 16, 16, "same"),
        ("recompiles", [2, 4], 3, "same"),
        ("recompiles", [2, 4], [2, 5], "WORSE"),
        ("recompiles", 2, None, "not judged"),
    ],
)
def test_counts_are_compared_exactly(name: str, before: Any, now: Any, verdict: str) -> None:
    counts = {} if now is None else {name: now}
    assert judged(row(counts={name: before}), row(counts=counts)).verdict == verdict


def test_rows_are_measured_from_runs_with_the_noise_over_rounds() -> None:
    (regional,) = [row for row in measured(as_runs(static(noise=0.0))) if row.arm == "regional"]
    assert regional.workload == ["task=captioning", "task.data.batch_size=32"]
    assert regional.ratio is not None
    assert regional.ratio.median == pytest.approx(26.26 / 27.07, rel=1e-3), "as published"
    assert regional.warmup_seconds == Span(10.4, 10.4, 10.4), "of cold starts"
    assert regional.counts == {"graphs": 8, "graph_breaks": 0, "recompiles": 0}
    assert regional.runs == 6


def test_a_row_whose_runs_failed_is_worse_and_says_why() -> None:
    broken = record("regional", status="failed", reason="CUDA out of memory")
    (now,) = measured(as_runs([record("eager"), broken]))
    found = judged(row(), now)
    assert found.verdict == "FAILED"
    assert str(found.moves[0]) == "run finished -> 1 of 1 runs CUDA out of memory"
    (alone,) = measured(as_runs([record("regional")]))
    assert alone.failed == "no ratio: eager did not finish"


def test_a_command_is_known_by_what_a_step_depends_on() -> None:
    typed = ["-m", "experiment=gpt2", "trainer.max_steps=200", "seed=3", "compile=whole", "compile.whole.mode=x"]
    swept = ["trainer.progress=none", "compile.whole.mode=x", "experiment=gpt2", "compile=whole", "repeat=cold"]
    assert identity(typed) == identity(swept) == (("experiment=gpt2",), "whole compile.whole.mode=x")
    assert identity(["compile=[regional, 'buckets']"])[1] == "[regional,buckets]"
    assert identity(["compile=[whole]"]) == identity(["compile=whole"])
    assert identity(["task=micro"]) == (("task=micro",), "eager")


def test_a_file_keeps_machines_apart_and_reads_back_as_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "drift.json"
    machines = {"one": [row(counts={"graphs": 3, "recompiles": [1, 2]}, runs=3)], "two": [row(arm="whole")]}
    save(machines, file)
    assert load(file) == machines
    assert json.loads(file.read_text())["machines"]["one"]["rows"][0]["ratio"]["median"] == 1.5
    assert '     "ratio": {"median": 1.5, "low": 1.48, "high": 1.52}' in file.read_text()
    assert load(tmp_path / "none.json") == {}


def test_new_figures_take_the_place_of_old_ones() -> None:
    again = row(ratio=Span(2.0))
    assert merged([row(), row(arm="whole")], [row(arm="debug"), again]) == [again, row(arm="whole"), row(arm="debug")]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 1, "machines": {"x": {"rows": [{"color": 1}]}}}', '{"schema": 2}']
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "drift.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"drift\.json: (not a reference|reference schema 2, this version reads 1)"):
        load(file)


def test_figures_are_kept_to_four_digits() -> None:
    assert Span.of(Ratio(1.234567, 1.2, None, 3, "faster", "pairs")) == Span(1.235, 1.2, None)


def test_a_machine_is_its_device_processor_and_major_versions() -> None:
    assert fingerprint(record("eager")) is None, "a GPU's record that does not name its host"
    assert fingerprint(record("eager", processor=HOST)) == f"NVIDIA H200, {HOST}, torch 2, triton 3, cuda 13"
    on_processor = RunRecord(task="toy", device=HOST, device_type="cpu", versions={"torch": "2.11", "cuda": None})
    assert fingerprint(on_processor) == f"{HOST}, torch 2"
