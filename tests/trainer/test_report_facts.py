"""What strategies found, as people read it: units where the names say them, and nothing that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategies import STRATEGIES
from tests.trainer.runs import train
from trainer.console import summary
from trainer.wording import flatten, with_unit

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
