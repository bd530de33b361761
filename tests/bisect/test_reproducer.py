"""The reproducer: it shows the same failure and ends with exit code 1; without the fault, with 0.

It is run as a process of its own in test_bisect_command.py.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts.bisect.bench import Bench
from strategies import Whole
from tests.bisect.conftest import with_module
from tests.bisect.planted import Breaking, Counting, Hooked, Middle, Net, Plain, Sine
from tests.bisect.trained import Trained, loader


def written(net: nn.Module, folder: Path, backend: str, symptom: str, path: str = "net.blocks.0") -> Path:
    """The reproducer of what is planted in the first block."""
    files: list[Path] = []

    def use(bench: Bench) -> None:
        files.append(bench.reproducer(path, 0, folder, symptom=symptom, reason=None))

    torch.manual_seed(0)
    with_module(Trained(net), loader(4), [Whole(backend=backend, fullgraph=False)], use, whole=["net"])
    torch._dynamo.reset()
    return files[0]


def run_here(file: Path) -> int:
    """The exit code of the file run in this process, which is quicker."""
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(file), run_name="__main__")
    return int(stopped.value.code or 0)


def test_a_wrong_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "net.blocks.0.inner"
    file = written(Net(Middle(Sine())), tmp_path, "planted_wrong_sine", "differs", path)
    assert path in file.read_text()
    assert torch.load(tmp_path / "reproduce.pt", weights_only=False)["args"][0].shape == (4, 8)
    assert run_here(file) == 1
    said = capsys.readouterr().out
    # 1.01 times in the forward, and once more in the backward of the square.
    assert "outputs and gradients 0.0201 of eager's away from them" in said
    assert said.splitlines()[-1] == "shown again"


@pytest.mark.parametrize(
    ("net", "backend", "symptom", "message"),
    [
        (Net(Middle(Sine())), "planted_backward", "fails", "no kernel for a cosine"),
        (Net(Counting()), "eager", "recompiles", "self.calls"),
        (Net(Breaking()), "eager", "breaks", "torch._dynamo.graph_break()  # planted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_goes_wrong_is_shown_again(
    net: nn.Module, backend: str, symptom: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert run_here(written(net, tmp_path, backend, symptom)) == 1
    assert message in capsys.readouterr().out


def test_a_module_without_the_fault_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(written(Net(Plain()), tmp_path, "eager", "differs")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not shown"


@pytest.mark.parametrize(
    ("path", "message"),
    [("net.blocks.0", r"net\.blocks\.0 cannot be (saved|copied)"), ("net.blocks", r"a step does not call net\.blocks")],
)
def test_what_cannot_be_written_is_said(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        written(Net(Hooked()), tmp_path, "eager", "differs", path)
    assert not list(tmp_path.iterdir())
