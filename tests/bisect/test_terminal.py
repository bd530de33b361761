"""The verdict in words: nothing wrong, a culprit with its line, what shows only together, time that is spread."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from scripts.bisect.__main__ import lines, trial_line
from scripts.bisect.search import Culprit, OptionTried, Outcome, Report


def said(**facts: Any) -> str:
    report = Report(task="mine", strategies="whole", device="cpu", **facts)
    console = Console(file=io.StringIO(), width=500)
    for line in lines(report):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_wrong() -> None:
    text = said(searched_for=["fails", "slower"])
    assert "nothing wrong: mine, whole compiles, is not slower than eager" in text


def test_a_culprit_with_class_phase_and_line() -> None:
    culprit = Culprit(
        path="net.a",
        kind="A",
        source="/x/a.py:3",
        outcome=Outcome(shows=True, reason="no", phase="backward", where="/x/a.py:5 in f", code="y()", batch="4 x 8"),
    )
    tried = [OptionTried(text="compile.whole.mode=default", shows=False), OptionTried(text="dynamic", shows=True)]
    text = said(
        symptom="fails", whole=Outcome(shows=True, reason="no"), culprits=[culprit], options=tried,
        rest=["net.b"], rest_is_clean=True,
    )  # fmt: skip
    for line in (
        "culprit: net.a (A, /x/a.py:3): compiled alone it fails to compile: no",
        "in the backward at /x/a.py:5 in f with the batch 4 x 8",
        "    y()",
        "option: compile.whole.mode=default makes it go away",
        "option: dynamic shows it too",
        "the rest: 1 submodules compile without it: net.b",
    ):
        assert line in text


def test_what_shows_only_together() -> None:
    text = said(symptom="fails", whole=Outcome(shows=True), together=["net.a", "net.b"])
    assert "only together: net.a, net.b: none of them fails to compile alone" in text


def test_a_line_for_each_trial() -> None:
    assert trial_line(3, "fails? net", Outcome(shows=True, reason="no kernel")) == "  3  fails? net: yes, no kernel"
    assert trial_line(3, "differs? net", Outcome(shows=False)) == "  3  differs? net: no"
    assert trial_line(3, "differs? net", Outcome(shows=False, reason="x")) == "  3  differs? net: no, it fails: x"
