"""``python -m scripts.bisect``: a search from end to end, the commands it suggests, and what it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from scripts.bisect.__main__ import main
from tests.conftest import ROOT
from tests.processes import python
from trainer.config import compose
from trainer.run import run

PLUGIN = """
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L

from tasks import BatchCounts, Declaration, Task
from tests.bisect import planted
from trainer.config import register_task


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return planted.loader(4, 4)


@dataclass(kw_only=True, slots=True)
class Planted(Task):
    name: ClassVar[str] = "planted"

    def build_data(self, *, seed: int) -> L.LightningDataModule:
        return Data()

    def build_module(self, *, max_steps: int) -> L.LightningModule:
        return planted.Trained(planted.Net(planted.Middle(planted.Sine())))

    def declare(self) -> Declaration:
        return Declaration(whole=("net",))

    def count(self, batch: Any) -> BatchCounts:
        return BatchCounts(samples=len(batch))


register_task(Planted)
"""
FAULTY = ("task=planted", "compile=whole", "compile.whole.backend=planted_wrong_sine")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: None) -> str:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return str(tmp_path / "configs")


def test_from_end_to_end(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir", plugin, *FAULTY]) == 1
    said = capsys.readouterr()
    assert "culprit: net.blocks.0.inner (Sine" in said.out
    assert " away from eager's" in said.err.partition("  1  net: ")[2].partition("\n")[0]
    (line,) = [each for each in said.out.splitlines() if each.startswith("continue with: ")]
    command = shlex.split(line.removeprefix("continue with: "))
    assert command[:5] == ["python", "-m", "trainer", "--config-dir", plugin]
    # The suggested command runs, and its own checks pass.
    record = run(compose([*command[5:], "trainer=debug", "trainer.max_steps=2"]), run_dir=tmp_path / "run", command=[])
    assert (record.status, record.regions) == ("finished", 3)
    assert record.report["parity"]["verdict"] == "passed"


def test_the_standard_library_keeps_its_module_of_the_same_name() -> None:
    code = "import random, bisect; print(bisect.__file__, bisect.bisect([1, 2, 3], 2), bisect.insort([], 1))"
    done = python("-c", code, path=(ROOT / "scripts",))
    assert done.stdout.split() == [str(ROOT / "scripts" / "bisect" / "__init__.py"), "2", "None"], done.stderr
