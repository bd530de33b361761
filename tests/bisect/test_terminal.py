"""The verdict in words: nothing wrong, a culprit with its line, what shows only together, time that is spread."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from scripts.bisect.report import (
    FOUND,
    NOTHING_WRONG,
    ONLY_TOGETHER,
    Culprit,
    OptionTried,
    Outcome,
    Report,
    print_report,
    trial_line,
)


def said(**facts: Any) -> str:
    report = Report(task="mine", strategies="whole", command=[], compiled=["net"], device="cpu", **facts)
    console = Console(file=io.StringIO(), width=500)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_wrong() -> None:
    text = said(searched_for=["fails", "slower"])
    assert "nothing wrong: mine, whole (net) compiles, is not slower than eager" in text


def test_a_culprit_with_class_phase_and_line() -> None:
    culprit = Culprit(
        path="net.a",
        kind="A",
        file="/x/a.py",
        line=3,
        outcome=Outcome(shows=True, reason="no", phase="backward", where="/x/a.py:5 in f", code="y()"),
    )
    tried = [OptionTried(text="compile.whole.mode=default", shows=False), OptionTried(text="dynamic", shows=True)]
    text = said(
        symptom="fails", whole=Outcome(shows=True, reason="no"), culprits=[culprit], options=tried,
        rest=["net.b"], rest_is_clean=True,
        suggestions=["python -m trainer"], reproducer="r.py", reproducer_shows=True,
        shapes=["a", "b"], shapes_that_show=["b"],
    )  # fmt: skip
    for line in (
        "culprit: net.a (A, /x/a.py:3): compiled alone it fails to compile: no",
        "in the backward at /x/a.py:5 in f",
        "    y()",
        "shapes: with 1 of 2 shapes of batch: b",
        "option: compile.whole.mode=default makes it go away",
        "option: dynamic shows it too",
        "the rest: 1 submodules compile without it: net.b",
        "continue with: python -m trainer",
        "reproducer: python r.py (shows it)",
    ):
        assert line in text


def test_what_shows_only_together_and_time_that_is_spread() -> None:
    whole = Outcome(shows=True)
    text = said(symptom="fails", whole=whole, together=["net.a", "net.b"], together_reason="both")
    assert (
        "only together: net.a, net.b: each alone shows nothing, with all of them the step fails to compile: both"
        in text
    )
    lost = {"net.a": -0.001, "net.b": 0.002}
    slow = {"together": ["net.a", "net.b"], "together_reason": "9 ms", "lost_seconds_by_part": lost}
    text = said(symptom="slower", whole=whole, **slow)
    assert "spread: no part alone loses half of it" in text
    assert text.index("net.b alone: 2 ms slower") < text.index("net.a alone: 1 ms faster")


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, NOTHING_WRONG),
        ({"symptom": "fails", "culprits": [Culprit(path="net", outcome=Outcome(shows=True))]}, FOUND),
        ({"symptom": "fails", "together": ["a", "b"]}, ONLY_TOGETHER),
    ],
)
def test_exit_codes_are_in_the_json(facts: dict[str, Any], code: int) -> None:
    report = Report(task="mine", strategies="whole", command=[], **facts)
    assert json.loads(report.as_json())["exit_code"] == report.exit_code == code


def test_a_line_for_each_trial() -> None:
    assert trial_line(3, "fails? net", Outcome(shows=True, reason="no kernel")) == "  3  fails? net: yes, no kernel"
    assert trial_line(3, "differs? net", Outcome(shows=False)) == "  3  differs? net: no"
    assert trial_line(3, "differs? net", Outcome(shows=False, reason="x")) == "  3  differs? net: no, it fails: x"
