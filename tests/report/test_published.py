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
    FIRST,
    HOLDS,
    LONGEST,
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
from trainer.telemetry.record import RunRecord

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
    shown = {match[3] for text in texts.values() for match in published.MARK.finditer(text)}
    alone = set(re.findall(rf"pictures/({published.CURVES_ALONE}[\w-]+)-losses\.png", "".join(texts.values())))
    files = {file.stem for file in published.RECORDS.glob("*.jsonl") if not file.name.startswith(published.SAME)}
    assert shown | alone == files, "each record belongs to a table, those of losses alone to a picture"


def test_first_and_longest_steps_are_those_of_runs_with_a_point_a_step() -> None:
    progress = [[0, 9.0], [1, 12.0], [2, 12.5], [3, 12.6]]
    records = sweep()
    for one in records[:2]:
        one.steps, one.progress = 3, progress
        one.config["trainer"] = {"log_every_n_steps": 1}
    records[2].progress, records[2].steps = progress, 3  # points of every step, as short runs have, and not asked for
    figures = rows_of(runs_of(records))[0].figures
    assert figures[FIRST] == (12.0,)
    assert figures[LONGEST] == pytest.approx((0.5,))


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


def test_a_table_that_was_edited_differs_from_its_records(tmp_path: Path) -> None:
    records = tmp_path / "results" / "records"
    publish([on_disk(tmp_path / "runs", sweep())], records / "row.jsonl")
    page = records.parent / "page.md"
    page.write_text("# Figures\n\n<!-- table: row -->\n<!-- end -->\nafter\n", encoding="utf-8")
    assert refresh(records) == [page]
    made = page.read_text(encoding="utf-8")
    assert refresh(records) == [], "a page is made once"
    assert refreshed(made.replace("1.25", "1.35"), records) == made
    page.write_text(made.replace("row", "gone"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file"):
        refresh(records)


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


def test_ratios_are_taken_in_each_round_and_a_wide_row_is_marked() -> None:
    eager, regional = rows_of(runs_of(sweep()))
    assert regional.figures[RATIO] == pytest.approx((1.25, 1.25, 0.110 / 0.092))
    text = "\n".join(published.table(runs_of(sweep()), "records/row.jsonl"))
    assert "| `eager` † | 3 | 1 |" in text, "its steps spread by the slow round"
    assert "| `regional` | 3 | ~1.23 (1.20 to 1.25) |" in text, "its ratios do not"
    assert "GPU clock 1755 MHz · power limit 700 W · 61 °C · throttled: no" in text
    assert (eager.spread or 0) > published.MAX_SPREAD


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


def test_kernels_are_a_table_of_their_own(tmp_path: Path) -> None:
    kernel = {"name": "gemm<256> *", "share": 0.25, "milliseconds_per_step": 7.5, "calls_per_step": 37.0}
    facts = {"busy_seconds_per_step": 0.03, "idle_share": 0.01, "kernels": [kernel], "trace": "/home/me"}
    profiled = record("regional", report={"profile": facts})
    profiled.config["profile"] = "on"
    file = tmp_path / "row.jsonl"
    publish([on_disk(tmp_path / "runs", [*sweep(), profiled])], file)
    text = "\n".join(published.kernels(find([file]), "records/row.jsonl"))
    assert "`regional` · 30.0 ms of the device a step, idle 1.0%" in text
    facts["idle_share"] = None  # as where steps vary much
    publish([on_disk(tmp_path / "varying", [*sweep(), profiled])], tmp_path / "varying.jsonl")
    assert "a step · " in published.kernels(find([tmp_path / "varying.jsonl"]), "")[0]
    assert text.splitlines()[-1] == r"| 7.50 | 25.0% | 37 | gemm\<256> \* |"
    assert "/home" not in file.read_text(encoding="utf-8")


def test_several_workloads_make_no_table() -> None:
    with pytest.raises(ValueError, match="one workload"):
        rows_of(runs_of([record("eager"), record("eager", batch_size=64)]))


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
