"""Tables, verdicts, flags, cells and scalings, for the runs of ``scenarios.py``, are those of ``golden/``.

After a change that is meant, ``python -m tests.report.test_golden`` writes them; look at the difference.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from tests.conftest import STARTED
from tests.report.records import ragged, static
from tests.report.scenarios import (
    CELLS,
    COLD,
    COMPARED,
    EAGER,
    FLAGGED,
    MODES,
    OPTIONS,
    SCALED,
    VERDICTS,
    against_eager,
)
from trainer.report import tables
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.run_verdict import run_verdict, verdict_lines
from trainer.report.runs import Run, group, parity_of
from trainer.report.statistics import Ratio, rounded
from trainer.report.tables import number
from trainer.sweep.plan import with_arms
from trainer.telemetry.record import RunRecord

GOLDEN = Path(__file__).with_name("golden")


def runs_of(records: Sequence[RunRecord]) -> list[Run]:
    return [Run(Path(f"run{place}"), one) for place, one in enumerate(records)]


def in_words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "no ratio"
    interval = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.4g} to {ratio.high:.4g})"
    return f"{ratio.value:.4f}{interval} in {ratio.pairs} pairs, {ratio.verdict}"


def of_comparison(found: WorkloadComparison) -> Iterator[str]:
    """The table, and figures beyond its digits."""
    yield from tables.plain_lines(tables.decision(found), 200)
    yield from ("", f"verdict: {found.verdict}", *tables.remarks(found), *tables.footnotes([found]))
    yield f"{found.start} starts; best: {found.best}; from step " + ", ".join(
        f"{number(one.from_steps)} {one.arm}" for one in found.crossings
    )
    for row in found.rows:
        totals = {steps: number(seconds) for steps, seconds in row.total_seconds.items()}
        pays = "" if row.break_even_steps is None else f"; pays after {row.break_even_steps:.2f}"
        yield f"{row.cell.arm}: {in_words(row.ratio)}{pays}; fixed {number(row.fixed_seconds)} s; seconds {totals}"


def comparisons() -> Iterator[str]:
    for name, (records, options) in COMPARED.items():
        yield f"==== {name}"
        for found in compare_runs(runs_of(records), **options):
            yield from of_comparison(found)
        yield ""


def both() -> list[WorkloadComparison]:
    records = [*static(), *ragged()]
    for one in records[: len(static())]:
        one.config["task"]["data"]["name"] = "static"
        one.roofline_share = 0.456 if one.label == "eager" else None
    return compare_runs(runs_of(records))


def terminal() -> Iterator[str]:
    for width in (80, 100, 200):
        out = io.StringIO()
        tables.show(both(), Console(file=out, width=width))
        yield from (f"==== {width} columns", *(line.rstrip() for line in out.getvalue().splitlines()))


def flags() -> Iterator[str]:
    for name, changes in FLAGGED.items():
        (found,) = compare_runs(runs_of(against_eager(changes)))
        parity = parity_of(found.rows[1].cell)
        yield f"{name}: {found.rows[1].flags} {found.unlike or ''}"
        yield f"    parity {parity}; {[one.arm for one in found.crossings]}; {found.verdict}"


def verdicts() -> Iterator[str]:
    for name, one in VERDICTS.items():
        found = run_verdict(one)
        yield f"==== {name}: {found.outcome}, shown {number(found.shown_ratio)}"
        steps = f"{number(found.eager_step_seconds)} to {number(found.step_seconds)} s"
        yield f"{steps}, {found.pairs} pairs of {found.batches} windows"
        yield from verdict_lines(one) or [f"no lines; next: {found.next_command}"]


def cells() -> Iterator[str]:
    for name, records in CELLS.items():
        yield f"==== {name}"
        for cell in group(runs_of(records)):
            counts = [len(runs) for runs in (cell.cold, cell.warm, cell.failed)]
            yield f"{cell.workload} | {cell.arm} | cold, warm, failed: {counts} | {cell.command}"


def scaled() -> Iterator[str]:
    for name, records in SCALED.items():
        yield f"==== {name}"
        for title, table in tables.scalings(runs_of(records)):
            yield from (title, *tables.plain_lines(table, 200))


FILES: dict[str, Callable[[], Iterator[str]]] = {
    "comparisons.txt": comparisons,
    "terminal.txt": terminal,
    "tables.md": lambda: iter([tables.markdown(both(), tables.scalings(runs_of(next(iter(SCALED.values())))))]),
    "flags.txt": flags,
    "verdicts.txt": verdicts,
    "cells.txt": cells,
    "scaling.txt": scaled,
}


def text_of(name: str) -> str:
    return "\n".join(FILES[name]()).rstrip() + "\n"


def test_options_of_a_strategy_go_where_it_goes() -> None:
    repeated = shlex.split(run_verdict(VERDICTS["noise, with options"]).next_command or "")
    assert repeated[:5] == ["python", "-m", "trainer", "-m", "task=toy"]
    arms = OverridesParser.create().parse_override(repeated[5]).value()
    chosen = [arm for _, arm in with_arms(["task=toy"], [str(arm) for arm in arms])]
    assert chosen == [("compile=eager",), ("compile=[regional,cuda_graph]", *OPTIONS[1:])]


def test_json_is_strict_and_has_nothing_for_what_never_pays_back() -> None:
    (found,) = compare_runs(runs_of(COMPARED["slower"][0]))

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    (written,) = json.loads(tables.as_json([found]), parse_constant=refuse)
    row = written["rows"][1]
    assert (row["break_even_steps"], row["ratio"]["verdict"], written["verdict"]) == (None, "slower", found.verdict)
    assert row["runs"] == {"cold": ["run3", "run4", "run5"], "warm": [], "failed": []}


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        (EAGER, {"at_steps": [0]}, "steps=0 must be at least 1"),
        ([], {}, "no runs"),
        ([*EAGER, *COLD], {"baseline": "hole"}, r"baseline='hole' is not one of the arms: eager, whole"),
        (MODES, {"baseline": "whole"}, "baseline='whole' is several arms"),
    ],
)
def test_what_cannot_be_compared_is_refused(records: list[RunRecord], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare_runs(runs_of(records), **options)


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "0"), (6.2, "7"), (99.4, "100"), (934, "930"), (996, "1,000"), (12345, "12,000"), (2.5e6, "2,500,000")],
)
def test_steps_are_told_to_two_digits(steps: float, text: str) -> None:
    assert rounded(steps) == text


def test_a_small_figure_keeps_two_digits() -> None:
    shown = {0.0: "0.000", 0.5: "0.500", 0.044: "0.044", 0.0074: "0.0074", 0.00041: "0.00041"}
    assert {value: number(value) for value in shown} == shown, "0.000 J/sample says nothing"


@pytest.mark.parametrize("name", FILES)
def test_what_is_shown_is_what_the_file_holds(name: str) -> None:
    assert text_of(name).splitlines() == (GOLDEN / name).read_text(encoding="utf-8").splitlines()


def test_a_terminal_shows_no_line_beyond_its_width() -> None:
    parts = (GOLDEN / "terminal.txt").read_text(encoding="utf-8").split("==== ")[1:]
    assert [max(map(len, part.splitlines()[1:])) <= int(part.split()[0]) for part in parts] == [True] * 3


if __name__ == "__main__":
    sys.argv[0] = STARTED
    for file in FILES:
        (GOLDEN / file).write_text(text_of(file), encoding="utf-8")
