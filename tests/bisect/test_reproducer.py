"""The reproducer: it shows the same failure and ends with exit code 1; without the fault, with 0.

It is run as a process of its own in test_bisect_command.py.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from scripts.bisect.bench import Bench
from scripts.bisect.report import Report
from tests.bisect.conftest import Searched
from tests.bisect.planted import Breaking, Counting, Hooked, Middle, Net, Plain, Sine


def written(searched: Searched, folder: Path, backend: str, symptom: str) -> Path:
    """The reproducer of a planted sine."""

    def reproduce(bench: Bench, report: Report) -> None:
        [culprit] = report.culprits
        file = bench.reproducer(culprit.path, 0, folder, symptom=symptom, reason=culprit.reason)
        assert culprit.path in file.read_text()
        assert torch.load(folder / "reproduce.pt", weights_only=False)["args"][0].shape == (4, 8)

    searched(Net(Middle(Sine())), backend, symptom, then=reproduce)
    return folder / "reproduce.py"


def run_here(file: Path) -> int:
    """The exit code of the file run in this process, which is quicker."""
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(file), run_name="__main__")
    return int(stopped.value.code or 0)


def test_a_wrong_result(searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(written(searched, tmp_path, "planted_wrong_sine", "differs")) == 1
    said = capsys.readouterr().out
    # 1.01 times in the forward, and once more in the backward of the square.
    assert "outputs and gradients 0.0201 of eager's away from them" in said
    assert said.splitlines()[-1] == "shown again"


def test_a_failure_in_the_backward(searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(written(searched, tmp_path, "planted_backward", "fails")) == 1
    assert "no kernel for a cosine" in capsys.readouterr().out


def test_what_compiles_again(searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reproduce(bench: Bench, report: Report) -> None:
        bench.reproducer("net.blocks.0", 0, tmp_path, symptom="recompiles", reason=None)

    with torch._dynamo.config.patch(error_on_recompile=False):
        searched(Net(Counting()), "eager", "recompiles", then=reproduce)
        assert run_here(tmp_path / "reproduce.py") == 1
    assert "self.calls" in capsys.readouterr().out


def test_a_break(searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reproduce(bench: Bench, report: Report) -> None:
        bench.reproducer("net.blocks.0", 0, tmp_path, symptom="breaks", reason=None)

    searched(Net(Breaking()), "eager", "breaks", then=reproduce)
    assert run_here(tmp_path / "reproduce.py") == 1
    assert "torch._dynamo.graph_break()  # planted" in capsys.readouterr().out


def test_a_module_without_the_fault_shows_nothing(
    searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reproduce(bench: Bench, report: Report) -> None:
        bench.reproducer("net.blocks.0", 0, tmp_path, symptom="differs", reason=None)

    searched(Net(Plain()), "eager", "breaks", then=reproduce)
    assert run_here(tmp_path / "reproduce.py") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not shown"


def test_what_cannot_be_saved_is_said(searched: Searched, tmp_path: Path) -> None:
    def reproduce(bench: Bench, report: Report) -> None:
        with pytest.raises(ValueError, match=r"net\.blocks\.0 cannot be (saved|copied)"):
            bench.reproducer("net.blocks.0", 0, tmp_path, symptom="differs", reason=None)
        with pytest.raises(ValueError, match=r"a step does not call net\.blocks"):
            bench.reproducer("net.blocks", 0, tmp_path, symptom="differs", reason=None)

    searched(Net(Hooked()), "eager", "breaks", then=reproduce)
    assert not list(tmp_path.iterdir())
