"""What strategies found, as people read it: units where the names say them, and nothing that does not exist."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from strategies import STRATEGIES
from tests.trainer.runs import train
from trainer.console import print_rows, summary
from trainer.telemetry.record import RunRecord
from trainer.telemetry.serialization import flatten, headlines, with_unit

FULL = "[regional,optimizer,buckets,cached]"
FIRST = {name: kind.headlines for name, kind in STRATEGIES.items()}


@pytest.mark.parametrize(
    ("fact", "value", "expected"),
    [
        ("expected_padded_share", 0.1234, "12.3%"),
        ("load_seconds", 1.5, "1.50 s"),
        ("gained_seconds", -26.745, "-26.75 s"),
        ("steps.eager_step_seconds", 0.01025, "10.2 ms"),
        ("compiled_milliseconds", 1.23456, "1.23 ms"),
        ("bytes_loaded", 3 << 20, "3.0 MiB"),
        ("examples", 12345, "12,345"),
        ("edges", [16, 32, 48], "16, 32, 48"),
        ("edges", list(range(8)), "0, 1, 2, 3, 4, 5, ... (8 in all)"),
        ("slower", False, "no"),
        ("reason", "x" * 200, "x" * 117 + "..."),
    ],
)
def test_a_value_has_the_unit_of_its_name(fact: str, value: Any, expected: str) -> None:
    assert with_unit(fact, value) == expected


def test_a_fact_that_does_not_exist_is_not_shown_and_a_zero_is() -> None:
    report: dict[str, dict[str, Any]] = {
        "cuda_graph": {"graphs": 0, "replayed_steps": 0, "eager_steps": 4, "captured": [], "refused": ["x", "y"]},
        "optimizer": {"form": "functional", "compiled_milliseconds": None},
        "warming": {},
    }
    assert headlines(report, FIRST) == {
        "cuda_graph": "graphs 0 · replayed steps 0 · eager steps 4 · refused x, y",
        "optimizer": "form functional",
    }


def test_a_strategy_that_nobody_here_knows_shows_all_it_found() -> None:
    report = {"theirs": {"kernels": 3, "tuning": {"search_seconds": 2.0}}}
    assert headlines(report, FIRST) == {"theirs": "kernels 3 · search 2.00 s"}


def test_known_names_without_a_known_fact_show_what_there_is() -> None:
    assert headlines({"cached": {"verdict": "skipped"}}, FIRST) == {"cached": "verdict skipped"}


def test_a_reason_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    record = RunRecord(task="captioning", report={"cuda_graph": {"refused": ["[bold]item[/] | read"]}})
    print_rows(console, summary(record))
    assert "[bold]item[/] | read" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_shows_what_each_of_its_strategies_found(tmp_path: Path) -> None:
    record = train(tmp_path / "run", f"compile.cached.url={tmp_path / 'store'}", strategy=FULL, task="micro")
    assert record.status == "finished"
    said = summary(record)
    assert said["buckets"].startswith("edges 16, 32 · expected padded share ")
    assert said["cached"].startswith("state idle · reason nothing was compiled by Inductor")
    assert said["optimizer"].startswith("form functional")
    assert "slowdown" not in said, "it is in the verdict"
    assert "2 x 32" in said["warming"]
    assert "parity" not in said, "it has a row of its own"
    # What is looked for first is what strategies really write.
    for name in ("buckets", "cached"):
        assert set(dict(flatten(record.report[name]))) & set(FIRST[name])


def test_eager_found_nothing() -> None:
    said = summary(RunRecord(task="captioning", warmup_seconds=1.0, warmup_steps=2))
    assert said["warm-up"] == "1.00 s in 2 steps"
    assert not set(said) & set(STRATEGIES)
