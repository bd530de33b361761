"""Torch's text about a break goes through as it is; the line is the user's."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from scripts.explain import merged, read_break
from trainer.telemetry import source
from trainer.telemetry.source import Line

SITE = Path(sysconfig.get_paths()["purelib"])
ITEM = (
    "Unsupported Tensor.item() call with capture_scalar_outputs=False\n  Explanation: Dynamo does not trace it.\n"
    "  Hint: Set capture_scalar_outputs.\n\n  Developer debug context: call_method\n\n"
    " For more details about this graph break, please visit: https://x.io/compile-graph-break-site/gb/gb0124.html"
)
MINE, THEIRS, TORCHS = (
    Line(file="/mine/net.py", number=3, function="forward", code="y = block(x)"),
    Line(file=str(SITE / "transformers" / "gpt2.py"), number=7, function="forward", code="n = x.item()"),
    Line(file=str(SITE / "torch" / "nn" / "modules" / "module.py"), number=9, code="hook_result = hook(self, args)"),
)


def test_torchs_text_goes_through_as_it_is() -> None:
    one = read_break(ITEM, [MINE], region="Net", phase="training")
    assert one.texts == [ITEM]
    assert (one.where, one.called_from, one.inside) == (MINE, None, None)


def test_the_line_is_the_innermost_outside_torch_and_says_who_called_it() -> None:
    one = read_break(ITEM, [MINE, THEIRS, TORCHS], region="Net", phase="training")
    assert (one.where, one.called_from, one.inside) == (THEIRS, MINE, TORCHS)


def test_a_break_that_is_met_twice_is_one_and_knows_its_caller() -> None:
    inner = read_break(ITEM, [THEIRS], region="Net", phase="training")
    outer = read_break(ITEM, [MINE, THEIRS], region="Net", phase="training")
    (one,) = merged([inner, outer])
    assert (one.count, one.where, one.called_from, one.texts) == (2, THEIRS, MINE, [ITEM])


@pytest.mark.parametrize(
    ("text", "says"),
    [("generic_jump TensorVariable()", "torch.where"), ("step_unsupported", "breaks"), ("", "no reason given")],
)
def test_words_without_an_explanation_get_one(text: str, says: str) -> None:
    (found,) = read_break(text, [], region=None, phase="training").texts
    assert found.startswith(text)
    assert says in found


def test_lines_are_read_with_their_code_and_shown_from_where_the_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.py"
    file.write_text("first\n    second\n")
    line = source.line(str(file), 2, "torch_dynamo_resume_in_forward_at_1")
    assert (line.function, line.code) == ("forward", "second")
    monkeypatch.chdir(tmp_path)
    assert source.shown(str(file)) == "net.py"
    assert source.shown(THEIRS.file) == "transformers/gpt2.py"
    assert source.line(str(tmp_path / "gone.py"), 1).code is None


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
    assert (source.is_machinery(file), source.is_library(file)) == (whose == "torch's", whose != "mine")
    assert source.shown(file) == shown
