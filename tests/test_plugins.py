"""Plug-ins: the page on extending works as it is written, and mistakes are said shortly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import command_alone, on_ranks

BLOCK = re.compile(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GOOD = "@dataclass(kw_only=True, slots=True)"
STRATEGY = """
from dataclasses import dataclass
from typing import ClassVar
from strategies.base import Stage, Strategy
from trainer.config import register_strategy

{decorator}
class Mine(Strategy):
    name: ClassVar[str] = "{name}"
    stage: ClassVar[Stage] = Stage.MODULE
    size: int = 1

register_strategy(Mine)
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The files of docs/extending.md; blocks of one file add up."""
    for name, text in BLOCK.findall((ROOT / "docs" / "extending.md").read_text()):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.write(text)
    (tmp_path / "mine" / "crucible").symlink_to(ROOT / "trainer" / "crucible")  # as an installation maps it
    return tmp_path


@pytest.mark.slow
@pytest.mark.xdist_group("two_processes")
def test_the_pages_strategy_and_task_train(page: Path) -> None:
    settings = ["compile.foreach_sgd.backend=aot_eager", "trainer.max_steps=4", "trainer.accelerator=cpu"]
    arguments = ["task=line", "compile=[parts,foreach_sgd]", *settings, "hydra.run.dir=run"]
    code = on_ranks(command_alone, ["--config-dir", "mine", *arguments], page, page / "said", ranks=1)
    assert code == [0], (page / "said").read_text()
    record = json.loads((page / "run" / "record.json").read_text())
    assert (record["task"], record["label"], record["status"]) == ("line", "parts+foreach_sgd", "finished")
    assert record["strategies"][0]["backend"] == "aot_eager"
    assert record["regions"] == 2
    assert record["report"]["parity"]["verdict"] == "passed"
    assert (record["audits"]["verdict"], "gradient" in record["audits"]["worst"]) == ("clean", True)
    assert record["ended_in_eager"] is False


@pytest.mark.slow
def test_plug_ins_reach_the_cells_of_a_sweep(page: Path, start_trainer: Any) -> None:
    arguments = ["task=line", "compile=eager,parts", "hydra.sweep.dir=sweep"]
    process = start_trainer(["--config-dir", "mine", "-m", *arguments], cwd=page)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert sorted(file.parent.name for file in page.glob("sweep/*/record.json")) == [
        "0-compile=eager",
        "1-compile=parts",
    ]


def test_help_lists_what_a_plug_in_adds(page: Path, command_line: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line("--config-dir", str(page / "mine"), "task=line", "--help") == 0
    text = capfd.readouterr().out
    assert re.search(r"also .*\bparts\b", text)
    assert re.search(r"task\.width=32 +Features of each hidden layer", text)


def test_a_class_alone_is_an_option(command_line: Any, called: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(STRATEGY.format(decorator=GOOD, name="mine"))
    assert command_line("--config-dir", ".", "compile=mine", "compile.mine.size=3") == 0
    assert called[0]["config"].compile["mine"].size == 3
    assert called[0]["run_dir"].parent.name == "mine"
    assert called[0]["command"] == ["--config-dir", str(tmp_path), "compile=mine", "compile.mine.size=3"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("raise RuntimeError('no licence')", "plugin.py: RuntimeError: no licence"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        (
            STRATEGY.format(decorator="", name="mine"),
            "Mine must be decorated with @dataclass(kw_only=True, slots=True)",
        ),
        (STRATEGY.format(decorator=GOOD, name="whole"), "Mine.name='whole' is the name of one that ships"),
        (STRATEGY.format(decorator=GOOD, name="a b"), "Mine.name='a b' must be a ClassVar[str] holding an identifier"),
    ],
)
def test_what_is_wrong_with_a_plug_in_is_one_line(
    command_line: Any,
    called: list[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    complaint: str,
) -> None:
    (tmp_path / "plugin.py").write_text(text)
    assert command_line("--config-dir", str(tmp_path), "task=captioning") == 2
    said = capfd.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert called == []
