"""Some of the cases, and that the page is what the command makes of the lines beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._functorch import config as functorch_config

from tests.catch_rate import CASES
from tests.catch_rate.case import COUNTED
from tests.catch_rate.page import ALARMS, LINES, PAGE, WHY, kinds, page, read
from tests.catch_rate.run import ABSENT, ALARM, AUDIT, AVOIDED, CAUGHT, FAILED, FIRST, HEALED, REFUSED, tried

ROOT = Path(__file__).parents[2]
ROWS = read(ROOT / LINES)
SAMPLE = {
    "an attribute of a class that changes": (AUDIT, ABSENT),
    "an attribute of a class that no guard looks at": (AUDIT,),
    "one tensor twice into an autograd.Function": (HEALED, ABSENT),
    "a write to an input that aliases another from some step on": (FIRST, ABSENT),
    "dropout drawn anew in the backward, by a memory budget": (FIRST, ABSENT),
    "a backward hook that is added once code is compiled": (REFUSED, ABSENT),
    "a shared table's gradient, written in part": (FIRST,),
    "a write to a diagonal": (ABSENT,),
}
"""With what may become of them: a later version has mended what an earlier one has."""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with functorch_config.patch(activation_memory_budget=1.0):
        yield


@pytest.mark.parametrize("name", SAMPLE)
def test_what_becomes_of_a_fault(name: str) -> None:
    line = tried(CASES[name])
    assert line.result in SAMPLE[name], line
    assert line.there == (line.result in CAUGHT)
    if line.result != AUDIT:
        assert line.left == {}, line


def test_the_page_is_made_of_the_lines() -> None:
    assert (ROOT / PAGE).read_text() == page(ROWS), "python -m tests.catch_rate --page makes it"


def test_every_case_was_run_with_the_oldest_torch_and_with_the_newest() -> None:
    names = {version: {one["case"] for one in ROWS if one["torch"] == version} for version in ("2.11.0", "2.15.0")}
    assert names == {version: set(CASES) for version in names}
    for one in ROWS:
        case = CASES[one["case"]]
        now = (list(case.issues), case.part, case.changes, case.reported, case.planted is not None)
        assert now == (one["issues"], one["part"], one["changes"], one["reported"], one["planted"]), one["case"]


def test_what_the_page_says_of_all_cases() -> None:
    """None ended, misses and false alarms are explained, and what is caught at once leaves no trace."""
    assert [one["case"] for one in ROWS if one["result"] == FAILED] == []
    assert {one["case"] for one in ROWS if one["result"] == ALARM} == set(ALARMS)
    assert {one["case"] for one in ROWS if one["there"] and one["result"] not in CAUGHT} == set(WHY)
    at_once = [one for one in ROWS if one["there"] and one["result"] in (FIRST, HEALED, REFUSED, AVOIDED)]
    assert [(one["case"], one["torch"], one["left"]) for one in at_once if one["left"]] == []


def test_the_aims() -> None:
    """Nine tenths of real faults that change a loss, a gradient or a buffer; an alarm in fifty healthy trainings."""
    caught, of = kinds(ROWS, planted=False, changes=COUNTED)
    assert caught >= 0.9 * of > 0
    assert len(ALARMS) <= 0.02 * sum(not one["there"] for one in ROWS)
