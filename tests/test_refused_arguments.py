"""Wrong arguments of the other commands are one line and exit code 2, before anything runs or is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import compare, report
from scripts.bisect import __main__ as bisect
from scripts.check import __main__ as check
from scripts.explain import __main__ as explain
from tests.report.records import save, static
from trainer.sweep import launcher

PEER = ("run=peer", "trainer.val_every_n_steps=0")
REFUSED = {
    bisect: [
        (["compile=auto"], "compile=auto: only a run chooses"),
        (["compile=hole"], "compile=hole is not an option; near: whole"),
        (["compile=eager"], "compile=eager: compiles no submodule"),
        (["compile=cuda_graph", "run=train"], "compile=cuda_graph: compiles no submodule"),
        (["compile=optimizer"], "compile=optimizer: compiles no submodule"),
        ([*PEER], "run=peer: bisect looks at training steps"),
        (["compile=whole", "compile.whole.mode=fastest"], "compile.whole.mode='fastest' is not one of"),
        (["--config-dir", "/nowhere"], "--config-dir='/nowhere' is not a folder"),
    ],
    check: [
        (["task=micro", "compile=eager"], "compile=eager: compiles nothing"),
        (["task=micro", "hydra.run.dir=x"], "hydra.run.dir=x: not for a check"),
        (["task=micro", "compile=whole", "compile=regional"], "several are written compile=whole,regional"),
        (["task=micro", "--base", "nowhere"], "--base=nowhere: neither a file or folder nor a commit of git"),
        (["task=micro", "--runs", "x"], "task=micro: not beside --runs"),
        (["task=micro", "--", "train.py"], "task=micro: not beside a script"),
        (["--", "trian.py"], "trian.py: no such script or command"),
        (["task=micro", "--comment", "none/comment.md"], "--comment='none/comment.md' is a folder, or lies in none"),
        (["task=micro", "--update", "--base", "base.txt"], "--base=base.txt: a base record that is stored is a file"),
    ],
    compare: [
        (["nowhere"], "error: nowhere: no such file or folder"),
        ([], "error: outputs: no such file or folder"),
        (["sweep", "--baseline", "hole"], "error: baseline='hole' is not one of the arms: eager, regional"),
    ],
    explain: [
        (["compile=eager"], "nothing to explain"),
        (["compile=[auto,optimizer]"], "compile=auto: only a run chooses"),
        (["compile=hole"], "compile=hole is not an option; near: whole"),
        ([*PEER], "explain looks at training steps"),
        (["compile=whole", "trainer.max_steps=0"], "trainer.max_steps=0 must be at least 1"),
        (["--json", "no/such/folder/x.json"], "--json='no/such/folder/x.json' is a folder, or lies in none"),
        (["--json", "."], "--json='.' is a folder"),
        (["--config-dir", "none"], "--config-dir='none' is not a folder"),
    ],
    report: [(["."], "no record.json in it or below")],
}


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        pytest.param(command, *case, id=f"{command.__name__.split('.')[1]} {' '.join(case[0])}")
        for command, cases in REFUSED.items()
        for case in cases
    ],
)
def test_wrong_arguments_are_one_line_before_anything_runs(
    command: Any,
    arguments: list[str],
    said: str,
    edge: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "run_cell", None)  # of a check
    if "sweep" in arguments:
        save(static(rounds=1), tmp_path / "sweep")
    before = sorted(tmp_path.rglob("*"))
    assert command.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert said in errors
    assert errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["--batches", "0"], ["--batches", "x"], ["--backend", "eager"]])
def test_wrong_options_of_explain_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        explain.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
