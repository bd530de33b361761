"""Torch's text goes through as it is; which line it is about, and whether every run has it, is read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from scripts.explain import findings
from trainer.telemetry import source_lines
from trainer.telemetry.record import Event
from trainer.telemetry.source_lines import Line

SITE = Path(sysconfig.get_paths()["purelib"])
MINE, THEIRS, TORCHS = (
    Line(file="/mine/net.py", number=3, function="forward"),
    Line(file=str(SITE / "transformers" / "gpt2.py"), number=7, function="forward"),
    Line(file=str(SITE / "torch" / "nn" / "modules" / "module.py"), number=9, function="_call_impl"),
)
SHAPE = "tensor 'x' size mismatch at index 1. expected 8, actual 9"


def recompiled(reason: str, phase: str = "training", step: int | None = 5, location: str = "/mine/net.py:3 f") -> Event:
    return Event(kind="recompile", reason=reason, location=location, phase=phase, step=step)


def test_the_line_is_the_innermost_outside_torch() -> None:
    assert source_lines.innermost([MINE, THEIRS, TORCHS]) == f"{THEIRS.file}:7 forward"
    assert source_lines.innermost([TORCHS]) == f"{TORCHS.file}:9 _call_impl"
    assert source_lines.innermost([]) is None


def test_a_break_that_is_met_twice_is_one() -> None:
    events = [
        Event(kind="graph_break", reason="Unsupported\n  Hint: do", location="/mine/net.py:3 forward"),
        Event(kind="graph_break", reason="Unsupported\n  Hint: do", location="/mine/net.py:3 torch_dynamo_resume_in_f"),
        recompiled("other"),
    ]
    (one,) = findings(events, "graph_break")
    assert (one.texts, one.where, one.count) == (["Unsupported\n  Hint: do"], "/mine/net.py:3 forward", 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [("generic_jump TensorVariable()", "torch.where"), ("step_unsupported", "breaks"), ("", "no reason given")],
)
def test_words_without_an_explanation_get_one(text: str, says: str) -> None:
    (found,) = findings([Event(kind="graph_break", reason=text)], "graph_break")[0].texts
    assert found.startswith(text)
    assert says in found


@pytest.mark.parametrize(
    ("phase", "step", "text", "expected"),
    [
        ("validating", 5, "GLOBAL_STATE changed: grad_mode", True),
        ("validating", 5, "self.training == True", True),
        ("validating", 5, "self.scale == 0.5", False),
        ("validating", 5, "self.training_steps == 3", False),
        ("training", 1, SHAPE, True),
        ("training", 1, "tensor 'x' requires_grad mismatch. expected requires_grad=1", True),
        ("training", 1, "self.scale == 0.5", False),
        ("training", 2, SHAPE, False),
        ("training", 2, "GLOBAL_STATE changed: grad_mode", False),
    ],
)
def test_graphs_of_validation_warmed_shapes_and_copies_are_expected(
    phase: str, step: int | None, text: str, expected: bool
) -> None:
    (one,) = findings([recompiled(f"0/0: {text}\nUser stack: x.size()", phase, step)], "recompile")
    assert one.expected is expected


def test_one_step_for_each_planned_shape_is_expected() -> None:
    events = [recompiled(f"0/0: {SHAPE}", "training", step) for step in (1, 2, 3, 4)]
    assert [(one.expected, one.count) for one in findings(events, "recompile", first_steps=3)] == [
        (True, 3),
        (False, 1),
    ]


def test_recompiles_of_one_line_are_one_with_each_guard() -> None:
    events = [*map(recompiled, ("0/0: b == 1", "0/1: b == 2", "0/0: b == 1")), recompiled("b == 1", location="a:1 f")]
    one, other = findings(events, "recompile")
    assert (one.texts, one.count) == (["b == 1", "b == 2"], 3)
    assert other.count == 1


def test_lines_are_read_with_their_code_and_shown_from_where_the_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.py"
    file.write_text("first\n    second\n")
    line = source_lines.line(str(file), 2, "torch_dynamo_resume_in_forward_at_1")
    assert (line.function, line.code) == ("forward", "second")
    monkeypatch.chdir(tmp_path)
    assert source_lines.display_path(str(file)) == "net.py"
    assert source_lines.display_path(str(SITE / "transformers" / "gpt2.py")) == "transformers/gpt2.py"
    assert source_lines.line(str(tmp_path / "gone.py"), 1).code is None


@pytest.mark.parametrize(
    ("file", "whose", "shown"),
    [
        ("/demos/mine/net.py", "mine", "net.py"),
        ("/demos/mine/.venv/lib/python3.11/site-packages/torch/nn/module.py", "torch's", "torch/nn/module.py"),
        ("/demos/mine/.venv/lib/python3.11/site-packages/timm/torch/vit.py", "theirs", "timm/torch/vit.py"),
        ("/usr/lib/python3/dist-packages/lightning/trainer.py", "torch's", "lightning/trainer.py"),
        ("/usr/lib/python3/dist-packages/lightning/demos/net.py", "theirs", "lightning/demos/net.py"),
        ("/src/pytorch/torch/nn/module.py", "torch's", "torch/nn/module.py"),
        ("/src/pytorch/net.py", "mine", "/src/pytorch/net.py"),
        ("/src/site-packages-2/net.py", "mine", "/src/site-packages-2/net.py"),
        (sysconfig.get_path("stdlib") + "/random.py", "theirs", "random.py"),
        (sysconfig.get_path("stdlib") + "-mine/net.py", "mine", sysconfig.get_path("stdlib") + "-mine/net.py"),
    ],
)
def test_a_library_is_known_by_where_it_is_installed(
    file: str, whose: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "cwd", lambda: Path("/demos/mine"))
    monkeypatch.setattr(torch, "__path__", ["/src/pytorch/torch"])
    assert source_lines.is_machinery(file) == (whose == "torch's")
    assert (source_lines.installed(file) is not None) == (whose != "mine")
    assert source_lines.display_path(file) == shown
