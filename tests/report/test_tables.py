"""Tables: the same comparison for people and for programs, within the width that there is."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.report.records import ragged, record, static
from trainer.report import tables
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run
from trainer.report.tables import ABSENT, tables_of
from trainer.telemetry.record import RunRecord


def compared(records: list[RunRecord]) -> list[WorkloadComparison]:
    return compare([Run(Path(str(number)), one) for number, one in enumerate(records)])


def shown(comparisons: list[WorkloadComparison], width: int) -> str:
    out = io.StringIO()
    tables.show(comparisons, Console(file=out, width=width))
    return out.getvalue()


@pytest.fixture(scope="module")
def both() -> list[WorkloadComparison]:
    records = [*static(), *ragged()]
    for one in records[: len(static())]:
        one.config["task"]["data"]["name"] = "static"
    return compared(records)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_shows_every_figure_within_its_width(both: list[WorkloadComparison], width: int) -> None:
    text = shown(both, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    words = set(text.split())
    for found in both:
        for column, texts in tables_of(found)[0].items():
            assert set(column.split()) <= words
            if column not in ("arm", "runs"):
                assert {word for cell in texts for word in cell.split()} <= words


@pytest.mark.parametrize("width", [100, 120])
def test_a_workload_falls_into_no_more_tables_than_there_are_questions(
    both: list[WorkloadComparison], width: int
) -> None:
    """Which arm, with warm caches, how fast, what compiling took: one table each, and none without figures."""
    for found in both:
        text = shown([found], width)
        headings = [line for line in text.splitlines() if line.split()[:1] == ["arm"]]
        assert len(headings) == 4
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_single_runs_claim_nothing_in_any_column() -> None:
    """The records of one round of the published figures: 1.85 times as fast, and no repeat to say so."""
    (found,) = compared([one for one in static(rounds=1) if one.start == "cold"])
    columns = tables_of(found)[0]
    assert "95% interval" not in columns
    assert "pays back after steps" not in columns
    for name, texts in columns.items():
        if name not in ("arm", "runs", "step ms"):
            assert all(text.startswith("~") for text in texts[1:])
    assert found.verdict == "single runs show no difference from eager; repeat with hydra.launcher.rounds=3"


def test_long_names_are_broken_between_strategies() -> None:
    (found,) = compared([record("eager"), record("cached+buckets+regional+optimizer+cuda_graph")])
    text = shown([found], 60)
    assert "cached+buckets+" in text
    assert "regional+optimizer+" in text
    assert "\n  cuda_graph " in text


def test_columns_without_any_figure_are_left_out() -> None:
    text = shown(compared([record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=2.0)]), 200)
    assert "J/sample" not in text
    assert "warm:" not in text
    assert "samples/s" in text


def test_brackets_in_names_are_shown_as_they_are() -> None:
    assert "blocks=[net]" in shown(compared([record("eager"), record("regional blocks=[net]")]), 200).replace('"', "")


def test_markdown_has_as_many_cells_in_every_line_and_the_commands(both: list[WorkloadComparison]) -> None:
    text = tables.markdown(both)
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace(r"\|", "").count("|") for line in rows}) <= 1
    for found in both:
        assert f"**Verdict:** {found.verdict}." in text
        assert all(row.cell.command in text for row in found.rows)


def test_csv_has_a_line_for_each_cell_and_leaves_absent_figures_empty(both: list[WorkloadComparison]) -> None:
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(both))))
    rows = [row for found in both for row in found.rows]
    assert [line["arm"] for line in lines] == [row.cell.arm for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert line["step_seconds"] == ("" if row.step_seconds is None else str(row.step_seconds.median))
        assert line["ratio_verdict"] == ("" if row.ratio is None else row.ratio.verdict)
        assert line["runs_failed"] == str(len(row.cell.failed))


def test_json_is_strict_and_says_never_for_what_never_pays_back() -> None:
    slower = [record("whole", step_seconds=0.2, warmup_seconds=9.0, round=number, start="cold") for number in range(2)]
    eager = [record("eager", warmup_seconds=1.0, round=number, start="cold") for number in range(2)]
    (found,) = compared([*eager, *slower])
    assert found.rows[1].break_even_steps == math.inf

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    (told,) = json.loads(tables.as_json([found]), parse_constant=refuse)
    assert told["rows"][1]["break_even_steps"] == "never"
    assert told["rows"][0]["break_even_steps"] is None
    assert [run["directory"] for run in told["rows"][1]["runs"]] == ["2", "3"]
    assert told["verdict"] == found.verdict
    assert tables_of(found)[0]["pays back after steps"] == [ABSENT, "never"]
