"""Torch's text about a guard goes through as it is; which line it is about, and whether every run has it, is read."""

from __future__ import annotations

import pytest

from scripts.explain import Finding, merged, read_recompile
from trainer.telemetry.source import Line

STACK = '\nUser stack trace:\n  File "/mine/net.py", line 7, in forward\n    return x * self.scale'
SHAPE = "tensor 'x' size mismatch at index 1. expected 8, actual 9"


def test_the_line_is_the_one_that_reads_what_changed() -> None:
    text = f"self.scale == 0.5    # return x * self.scale  # e/net.py:7 in forward{STACK}"
    one = read_recompile(f"0/0: {text}", function=None, region=None, phase="training")
    assert (one.texts, str(one.where), one.expected) == ([text], "/mine/net.py:7 in forward", False)


@pytest.mark.parametrize(
    ("phase", "text", "expected"),
    [
        ("validating", "GLOBAL_STATE changed: grad_mode", True),
        ("validating", "self.training == True", True),
        ("validating", "self.scale == 0.5", False),
        ("validating", "self.training_steps == 3", False),
        ("warming", "tensor 'x' size mismatch at index 1. expected 8, actual 9", True),
        ("warming", "self.scale == 0.5", False),
        ("training", "GLOBAL_STATE changed: grad_mode", False),
    ],
)
def test_graphs_of_validation_and_of_warmed_shapes_are_expected(phase: str, text: str, expected: bool) -> None:
    assert read_recompile(text, function=None, region=None, phase=phase).expected is expected


def test_a_region_that_is_called_for_the_first_time_may_have_another_size() -> None:
    def expected(text: str, *, first_call: bool = True) -> bool:
        return read_recompile(text, function=None, region=None, phase="training", first_call=first_call).expected

    assert expected(SHAPE)
    assert expected("tensor 'x' requires_grad mismatch. expected requires_grad=1")
    assert not expected(SHAPE, first_call=False)
    assert not expected("self.scale == 0.5")


def test_recompiles_of_one_line_are_one_with_each_guard_and_what_they_took() -> None:
    def recompiled(text: str, region: str = "Net") -> Finding:
        function = Line(file="/mine/net.py", number=3)
        return read_recompile(text, function=function, region=region, phase="training", seconds=0.5)

    texts = ("0/0: b == 1", "0/1: b == 2", "0/0: b == 1")
    one, other = merged([*map(recompiled, texts), recompiled(texts[0], "Head")])
    assert (one.texts, one.count, one.seconds) == (["b == 1", "b == 2"], 3, 1.5)
    assert (other.region, other.count) == ("Head", 1)
