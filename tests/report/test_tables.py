"""Tables: the same comparison for people and for programs, within the width that there is."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.report.records import ragged, record, static
from trainer.report import tables
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.runs import Run
from trainer.report.tables import ABSENT, all_figures, decision
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
def test_a_terminal_shows_one_table_within_its_width(both: list[WorkloadComparison], width: int) -> None:
    for found in both:
        text = shown([found], width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        assert len([line for line in text.splitlines() if line.split()[:1] == ["arm"]]) == 1
        words = set(text.split())
        for column, texts in decision(found).items():
            assert set(column.split()) <= words
            if column != "arm":
                assert {word for cell in texts for word in cell.split()} <= words


def test_the_share_of_the_roofline_has_a_column_where_it_is_known() -> None:
    records = static()
    for one in (one for one in records if one.label == "eager"):
        one.roofline_share = 0.456
    (found,) = compared(records)
    assert dict(zip(all_figures(found)["arm"], all_figures(found)["of roofline"], strict=True))["eager"] == "45.6%"
    assert set(all_figures(found)["of roofline"]) == {"45.6%", ABSENT}


def test_single_runs_claim_nothing_in_any_column() -> None:
    """The records of one round of the published figures: 1.85 times as fast, and no repeat to say so."""
    (found,) = compared([one for one in static(rounds=1) if one.start == "cold"])
    columns = decision(found) | all_figures(found)
    assert "95% interval" not in columns
    assert {"pays back after steps", "of roofline"}.isdisjoint(columns)
    for name, texts in columns.items():
        if name.startswith(("speed", "s to")):
            assert all(text.startswith("~") for text in texts[1:])
    assert found.verdict == "cannot tell from single runs; repeat with hydra.launcher.rounds=3"


def test_long_names_are_broken_between_strategies() -> None:
    (found,) = compared([record("eager"), record("cached+buckets+regional+optimizer+checkpointing+dynamic+cuda_graph")])
    text = shown([found], 80)
    assert re.search(r"\n  cached\+\S*\+ +1 +100 ", text)
    assert "cuda_graph" in text


def test_columns_without_any_figure_are_left_out() -> None:
    text = shown(compared([record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=2.0)]), 200)
    assert "warm start" not in text
    assert "GiB" not in text
    assert "speed" in text


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


def test_json_is_strict_and_has_nothing_for_what_never_pays_back() -> None:
    slower = [record("whole", step_seconds=0.2, warmup_seconds=9.0, round=number, start="cold") for number in range(2)]
    eager = [record("eager", warmup_seconds=1.0, round=number, start="cold") for number in range(2)]
    (found,) = compared([*eager, *slower])
    assert found.rows[1].break_even_steps == math.inf

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    (written,) = json.loads(tables.as_json([found]), parse_constant=refuse)
    assert written["rows"][1]["break_even_steps"] is None
    assert written["rows"][1]["ratio"]["verdict"] == "slower"
    assert written["rows"][1]["runs"]["cold"] == ["2", "3"]
    assert written["verdict"] == found.verdict
    assert decision(found)["pays back after steps"] == [ABSENT, "never"]


def test_a_small_figure_keeps_two_digits() -> None:
    shown = {0.0: "0.000", 0.5: "0.500", 0.044: "0.044", 0.0074: "0.0074", 0.00041: "0.00041"}
    assert {value: tables.number(value) for value in shown} == shown, "0.000 J/sample says nothing"
