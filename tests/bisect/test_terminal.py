"""The verdict in words: nothing wrong, a culprit with its class and batch, what differs only together."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from scripts.bisect.__main__ import lines, trial_line
from scripts.bisect.search import Node, Outcome, Report


def said(**facts: Any) -> str:
    console = Console(file=io.StringIO(), width=500)
    for line in lines(Report(**facts), "mine, whole"):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_wrong() -> None:
    assert "nothing wrong: mine, whole equals eager within its tolerance" in said(whole=Outcome(differs=False))


def test_a_culprit_with_class_and_batch() -> None:
    seen = Outcome(differs=True, reason="loss 0.1 of eager's away", batch="4 x 8")
    node = Node(path="net.a", about="A, /x/a.py:3", children=[Node(path="net.a.x")])
    rest = {"copies": ["net.c"], "rest": ["net.b"], "rest_outcome": Outcome(differs=False)}
    text = said(whole=seen, culprit=node, outcome=seen, **rest)
    for line in (
        "mine, whole computes something else than eager: loss 0.1 of eager's away, with the batch 4 x 8",
        "culprit: net.a (A, /x/a.py:3): compiled alone it computes something else than eager: loss 0.1",
        "none of what it is made of does",
        "with the 1 more of its class: net.c",
        "the rest: 1 submodules equal eager without it: net.b",
    ):
        assert line in text


def test_what_differs_only_together() -> None:
    text = said(whole=Outcome(differs=True))
    assert "only together: no submodule computes something else than eager alone" in text


def test_a_line_for_each_trial() -> None:
    assert trial_line(3, "net", Outcome(differs=True, reason="loss")) == "  3  net: differs, loss"
    assert trial_line(3, "net", Outcome(differs=False)) == "  3  net: equal"
    assert trial_line(3, "net", Outcome(differs=False, reason="x")) == "  3  net: not compared: x"
