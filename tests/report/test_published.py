"""Published figures: records as lines, tables made of them, and what agrees with a published row."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from strategies import STRATEGIES
from tests.conftest import ROOT
from tests.report.records import record
from tests.sweep import some
from trainer.config import compose
from trainer.report import published
from trainer.report.comparison import compare_runs
from trainer.report.pictures import PICTURES
from trainer.report.published import (
    BETTER,
    FAILS,
    HOLDS,
    NOT_COMPARED,
    RATIO,
    judged,
    publish,
    refresh,
    refreshed,
    rows_of,
)
from trainer.report.runs import Run, arm_of, find, fixed_settings, parity_of
from trainer.telemetry.machine_monitor import MachineFacts
from trainer.telemetry.record import RunRecord, RunVerdict

ROUNDS = {"eager": (0.100, 0.200, 0.110), "regional": (0.080, 0.160, 0.092)}
MACHINE = {"gpu_clock_mhz": 1755, "gpu_power_limit_watts": 700.0, "gpu_celsius": 61, "load_average": 1.5}


def sweep(**changes: object) -> list[RunRecord]:
    """Three rounds of two arms; the second round met a slow machine."""
    return [
        record(
            arm,
            step_seconds=seconds,
            round=number,
            started=f"2026-11-22T12:0{number}:00+00:00",
            machine=MachineFacts(seconds=9.0, processors=16, **MACHINE),
            **changes,
        )
        for number in (1, 2, 3)
        for arm, steps in ROUNDS.items()
        for seconds in [steps[number - 1]]
    ]


def on_disk(folder: Path, records: list[RunRecord]) -> Path:
    for number, one in enumerate(records):
        one.save(folder / str(number))
    return folder


def runs_of(records: list[RunRecord]) -> list[Run]:
    return [Run(Path(str(number)), one) for number, one in enumerate(records)]


def test_the_tables_of_docs_results_are_those_of_their_records() -> None:
    pages = sorted((ROOT / "docs" / "results").glob("*.md"))
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    stale = [name for name, text in texts.items() if refreshed(text) != text]
    assert stale == [], "python -m scripts.verify --tables makes them anew"
    assert list(published.stale_pictures()) == [], "python -m scripts.verify --tables draws them anew"
    linked = set(re.findall(r"records/([\w-]+)\.jsonl", "".join(texts.values())))
    alone = set(re.findall(rf"pictures/({published.CURVES_ALONE}[\w-]+)-losses\.png", "".join(texts.values())))
    files = {file.stem for file in published.RECORDS.glob("*.jsonl") if not file.name.startswith(published.SAME)}
    assert files <= linked | alone, "each record is behind a table, those of losses alone behind a picture"


def test_the_first_pages_show_only_a_recorded_terminal_and_pictures_that_are_drawn_from_records() -> None:
    drawn = {f"{file.stem}-{kind}.png" for file in published.RECORDS.glob("*.jsonl") for kind in PICTURES}
    for page in (ROOT / "README.md", ROOT / "docs" / "results" / "README.md"):
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert {Path(one).name for one in shown} <= drawn | {"terminal.svg"}
        assert shown or page.parent != ROOT, "the first page shows one"


@pytest.mark.parametrize("file", some(sorted(published.RECORDS.glob("*.jsonl")), every=4), ids=lambda file: file.stem)
def test_a_run_of_today_is_of_the_workload_that_was_published(file: Path) -> None:
    """A setting that went stays among the former ones, or no new run would be compared with the records."""
    published_record = find([file])[0].record
    today = RunRecord(task=published_record.task, label="", status="finished")
    today.config = json.loads(json.dumps(asdict(compose(published_record.command)), default=str))
    assert fixed_settings(published_record).keys() <= fixed_settings(today).keys()


def test_a_run_of_today_is_of_the_arm_that_was_published() -> None:
    """Or ``compare --against`` calls it not measured, and never finds that a figure does not hold."""
    options = {f"{name}.{field.name}" for name, kind in STRATEGIES.items() for field in fields(kind)}
    runs = [run.record for file in published.RECORDS.glob("*.jsonl") for run in find([file])]
    given = {option for record in runs if not record.label.startswith("peer") for option in arm_of(record)[1:]}
    assert {".".join(re.split("[.=]", option)[:2]) for option in given} <= options


def test_a_line_holds_what_a_comparison_reads(tmp_path: Path) -> None:
    records = [*sweep(), record("whole", status="interrupted")]
    records[1].notes, records[1].report["slowdown"] = ["seen in /home/me"], {"eager_seconds": [0.1] * 99}
    file = tmp_path / "row.jsonl"
    assert publish([on_disk(tmp_path / "runs", records)], file) == 6
    back, first = compare_runs(find([file])), compare_runs(runs_of(records[:6]))
    for then, now in zip(first[0].rows, back[0].rows, strict=True):
        assert (then.cell.arm, then.ratio, then.step_seconds) == (now.cell.arm, now.ratio, now.step_seconds)
        assert then.cell.over("graphs") == now.cell.over("graphs")
        assert (parity_of(then.cell), then.flags) == (parity_of(now.cell), now.flags)
    assert "/home" not in file.read_text(encoding="utf-8")
    assert max(map(len, file.read_text(encoding="utf-8").splitlines())) < 2000


def test_curves_are_kept_with_few_digits(tmp_path: Path) -> None:
    curve = [[float(step), 3.0 / step] for step in range(1, 257)]
    file = tmp_path / "row.jsonl"
    publish([on_disk(tmp_path / "runs", sweep(losses=curve, progress=curve))], file)
    (kept,) = {tuple(map(tuple, run.record.losses)) for run in find([file])}
    assert (kept[0], kept[-1]) == ((1, 3.0), (256, round(3 / 256, 5)))
    assert max(map(len, file.read_text(encoding="utf-8").splitlines())) < 9000


def test_pictures_of_pages_are_drawn_from_their_records_and_others_are_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    records, target = docs / "results" / "records", docs / "pictures" / "row-throughput.png"
    publish([on_disk(tmp_path / "runs", sweep())], records / "row.jsonl")
    (tmp_path / "README.md").write_text("![](docs/pictures/row-throughput.png) ![](docs/pictures/old-crossing.png)")
    assert refresh(records) == [target]
    assert list(target.parent.iterdir()) == [target]
    assert refresh(records) == [], "a picture is drawn once"
    publish([on_disk(tmp_path / "more", sweep(seed=1))], records / "row.jsonl")
    assert [stale for stale, *_ in published.stale_pictures(records)] == [target], "its records are others now"


def test_a_file_of_records_that_is_not_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "row.jsonl"
    for line in ("{", '{"task": 3, "schema": 1}', '{"task": "a"}'):
        file.write_text(f"{published.line_of(record('eager'))}\n{line}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"row\.jsonl:2: not a run record"):
            find([file])


def test_runs_without_a_round_make_no_pairs() -> None:
    """As in ``crucible compare``, whose ratio stands there then, without a range."""
    records = sweep()
    for one in records:
        one.round = None
    assert all(RATIO not in row.figures for row in rows_of(runs_of(records)))


def test_the_time_of_the_device_comes_from_runs_under_the_profiler() -> None:
    profiled = record(
        "regional", step_seconds=0.5, warmup_seconds=12.0, report={"profile": {"busy_seconds_per_step": 0.03}}
    )
    profiled.config["profile"] = "on"
    _, regional = rows_of(runs_of([*sweep(cache="warm", compile_seconds=1.0), profiled]))
    assert regional.figures["device ms a step"] == (30.0,)
    assert regional.figures["warm-up s, cold"] == (12.0,)
    assert max(regional.figures[published.STEP]) < 200, "its own steps are not the row's"
    eager, _ = rows_of(runs_of(sweep()))
    assert "device ms a step" not in eager.figures


def test_several_workloads_make_no_table() -> None:
    with pytest.raises(ValueError, match="one workload"):
        rows_of(runs_of([record("eager"), record("eager", batch_size=64)]))


def several() -> list[RunRecord]:
    """Three rounds of one model, and of two others single runs without one of eager: one by ``auto``, which began in
    eager, and one that was compared with eager by turns alone."""
    other = [record("auto", step_seconds=0.1, round=1), record("whole", step_seconds=0.05, round=1)]
    other[0].task, other[1].task = "swin", "vit"
    other[0].chosen_strategies = [{"name": "whole"}, {"name": "cuda_graph"}]
    other[0].report["auto"] = {"table": {"eager": {"step_seconds": 0.21}, "whole": {"step_seconds": None}}}
    for one in other:
        one.verdict = RunVerdict(
            outcome="faster", ratio=1.95, eager_step_seconds=0.2, break_even_steps=90, next_command="mine"
        )
    return [*sweep(), *other]


def test_models_are_one_table_with_a_ratio_for_each(tmp_path: Path) -> None:
    records = tmp_path / "docs" / "results" / "records"
    publish([on_disk(tmp_path / "runs", several())], records / "h100-models.jsonl")
    page = records.parent / "page.md"
    page.write_text("<!-- models: h100-models -->\n<!-- end -->\n![](../pictures/h100-models-ratios.png)\n")
    picture = tmp_path / "docs" / "pictures" / "h100-models-ratios.png"
    assert refresh(records) == [page, picture]
    assert refresh(records) == [], "both are made once"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert rows[0].startswith("| model | arm | rounds | ms a step | eager ms | over eager | pays after |")
    assert any("| `regional` | 3 | 92.0 (80.0 to 160) | 110 | ~1.23 (1.20 to 1.25) |" in row for row in rows)
    assert any("| swin | `auto` → `whole+cuda_graph` | 1 | 100 | 210 | 2.10 | 90 |" in row for row in rows)
    assert any("| vit | `whole` | 1 | 50.0 | ≤ 200 | ≤ 4.00 | ≥ 90 |" in row for row in rows)
    assert "mine" not in (records / "h100-models.jsonl").read_text(encoding="utf-8")
    task = sweep()[0].task
    assert sorted(published.published_rows(records)) == sorted(
        f"h100-models/{row}" for row in (f"{task}/eager", f"{task}/regional", "swin/auto", "vit/whole")
    )


def test_a_summary_names_a_row_of_several_workloads(tmp_path: Path) -> None:
    cold = [
        record(arm, step_seconds=step, round=number, warmup_seconds=wait, start="cold", compile_seconds=compiled)
        for number in (1, 2, 3)
        for arm, step, wait, compiled in (("eager", 0.2, 1.0, None), ("regional", 0.1, 9.0, 5.0))
    ]
    for one in cold:
        one.task = "swin"
    publish([on_disk(tmp_path / "runs", [*sweep(), *cold])], tmp_path / "h100-models.jsonl")
    lines = published.summary(["h100-models/swin/regional Swin, 64 images"], tmp_path)
    assert lines[2].startswith("| Swin, 64 images | `regional` | 200 ms | 100 ms | 2.00 |")


@pytest.mark.parametrize(
    ("name", "here", "same_gpu", "verdict"),
    [
        (RATIO, 1.60, False, HOLDS),
        (RATIO, 1.64, False, HOLDS),
        (RATIO, 1.70, False, BETTER),
        (RATIO, 1.40, True, FAILS),
        ("final loss", 1.2, False, FAILS),
        ("graphs", 1.5, False, HOLDS),
        ("graphs", 2, False, FAILS),
        ("graphs", 1, False, FAILS),
        ("recompiles", 1, False, BETTER),
        ("recompiles", 2, False, FAILS),
        ("ms a step", 1.6, True, HOLDS),
        ("ms a step", 2.0, True, FAILS),
        ("ms a step", 1.0, True, BETTER),
        ("ms a step", 1.6, False, NOT_COMPARED),
    ],
)
def test_a_figure_holds_within_the_published_range(name: str, here: float, same_gpu: bool, verdict: str) -> None:
    assert judged(name, (1.5, 1.55, 1.6), (here,), same_gpu) == verdict
    missing = NOT_COMPARED if name == "ms a step" else FAILS
    assert judged(name, (1.5,), (), same_gpu) == missing


def test_a_count_is_better_where_no_round_has_more() -> None:
    assert judged("recompiles", (2, 2, 2), (0, 0, 2), same_gpu=True) == BETTER
    assert judged("recompiles", (2, 2, 2), (0, 0, 9), same_gpu=True) == FAILS, (
        "the median says nothing of the last round"
    )
