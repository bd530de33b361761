"""Torch's text about a guard is read into what changed, from what to what, and whether every run has it."""

from __future__ import annotations

import pytest

from scripts.explain import merged_recompiles, read_recompile
from trainer.telemetry.source import FIXES, guard_of

STACK = '\nUser stack trace:\n  File "/mine/net.py", line 7, in forward\n    return x * self.scale'


@pytest.mark.parametrize(
    ("text", "kind", "what", "changes"),
    [
        ("tensor 'x' size mismatch at index 1. expected 8, actual 9", "shape", "tensor x, dimension 1", "8 -> 9"),
        ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", "strides", "tensor x, dimension 0", "8 -> 1"),
        ("tensor 'x' dtype mismatch. expected Float, actual Half", "dtype", "tensor x", "Float -> Half"),
        ("tensor 'b[0]' rank mismatch. expected 2, actual 3", "rank", "tensor b[0]", "2 -> 3"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=1", "requires gradient", "tensor 'x'", None),
        ("len(batch) != 1", "length", "batch", "1 -> ? items"),
        ("not self.seen", "length", "self.seen", "empty -> not empty"),
        ("self.drop.training == True", "training flag", "self.drop.training", "True -> ?"),
        ("self.scale == 0.5", "number", "self.scale", "0.5 -> ?"),
        ("___as_tensor(self.scale).item() == 0.5", "number", "self.scale", "0.5 -> ?"),
        ("G['FACTOR'] == 2.0", "global variable", "FACTOR", "2.0 -> ?"),
        ("self.kind == 'a'", "text", "self.kind", "'a' -> ?"),
        ("self.ready == False", "flag", "self.ready", "False -> ?"),
        ("self.mask is None", "None at first", "self.mask", "None -> ?"),
        ("___stack0 == 1.5", "value carried over a break", "a result of this line", "1.5 -> ?"),
        ("GLOBAL_STATE changed: grad_mode", "gradient mode", "grad_mode", None),
        ("x.size()[0] % 8 == 0", "size relation", "x.size()[0] % 8 == 0", "0 -> ?"),
        ("___check_type_id(self.f, 94)", "kind of object", "___check_type_id(self.f, 94)", None),
        ("something new", "other", "something new", None),
    ],
)
def test_each_form_is_read(text: str, kind: str, what: str, changes: str | None) -> None:
    one = read_recompile(f"0/1: {text}", function=None, region="Block", phase="training")
    assert (one.kind, one.what, one.changes) == (kind, what, [changes] if changes else [])
    assert one.fix == FIXES[kind]
    assert not one.expected


def test_the_line_is_the_one_that_reads_what_changed() -> None:
    text = f"0/0: self.scale == 0.5    # return x * self.scale  # e/net.py:7 in forward{STACK}"
    one = read_recompile(text, function=None, region=None, phase="training")
    assert one.guard == "self.scale == 0.5"
    assert str(one.where) == "/mine/net.py:7 in forward"


@pytest.mark.parametrize(
    ("phase", "text", "expected"),
    [
        ("validating", "GLOBAL_STATE changed: grad_mode", True),
        ("validating", "self.training == True", True),
        ("validating", "self.scale == 0.5", False),
        ("warming", "tensor 'x' size mismatch at index 1. expected 8, actual 9", True),
        ("warming", "self.scale == 0.5", False),
        ("training", "GLOBAL_STATE changed: grad_mode", False),
    ],
)
def test_graphs_of_validation_and_of_warmed_shapes_are_expected(phase: str, text: str, expected: bool) -> None:
    assert read_recompile(text, function=None, region=None, phase=phase).expected is expected


def test_pieces_behind_a_break_that_see_the_same_change_are_counted_with_it() -> None:
    text = "0/0: tensor 'x' size mismatch at index 0. expected 8, actual 9"
    piece = "1/0: tensor 'y' size mismatch at index 0. expected 8, actual 9"
    first = read_recompile(text, function=None, region="Net", phase="training")
    behind = read_recompile(piece, function=None, region="Net", phase="training", resumed=True)
    elsewhere = read_recompile(piece, function=None, region="Head", phase="training")
    assert [(one.what, one.count) for one in merged_recompiles([first, behind, elsewhere])] == [
        ("tensor x, dimension 0", 2),
        ("tensor y, dimension 0", 1),
    ]


def test_nothing_is_read_from_an_empty_text() -> None:
    assert guard_of(" \n") == ""
