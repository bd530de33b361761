"""``crucible check``: which runs it starts, what it says, stores and returns. Nothing is trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.check.__main__ import main
from scripts.check.comment import MARK
from scripts.check.measurement import FILE_NAME, load
from tests.check.runs import event
from tests.conftest import ROOT, STAND_IN
from tests.processes import Ended, python
from tests.report.records import record, save
from trainer.run_start import RECORDS_VARIABLE
from trainer.sweep import launcher
from trainer.sweep.plan import PlannedCell
from trainer.telemetry.record import Event, RunRecord

BREAK = event("graph_break", "/project/model.py:9 forward", "print is not traced")


class Cells:
    """Stands in for the processes of a check, and lists them; each side and arm has a step time and events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[PlannedCell] = []
        self.seconds: Callable[[PlannedCell], float] = lambda cell: 0.1 if "eager" in cell.title else 0.05
        self.events: list[Event] = []
        self.changes: dict[str, Any] = {}
        self.broken: Callable[[PlannedCell], RunRecord | None] = lambda cell: None
        monkeypatch.setattr(launcher, "run_cell", self._run)

    @property
    def titles(self) -> list[str]:
        return [cell.title for cell in self.ran]

    def _run(self, cell: PlannedCell, signals: Sequence[int]) -> None:
        self.ran.append(cell)
        assert cell.folder.is_dir()
        if (broken := self.broken(cell)) is not None:
            cell.record, cell.exit_code = broken, 2 if (broken.reason or "").startswith("refused: ") else 1
            return
        arm = cell.chosen[0].strip("[]").replace(",", "+")
        wobble = 1 + 0.01 * (len(self.ran) % 3)
        events = [] if arm == "eager" or "of base" in cell.title else self.events
        made = record(
            arm, step_seconds=self.seconds(cell) * wobble, device="AMD EPYC", device_type="cpu", events=events
        )
        for name, value in self.changes.items() if made.strategies else ():
            setattr(made, name, value)
        cell.record, cell.exit_code = made, 0


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cells:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return Cells(monkeypatch)


def git(*arguments: str, folder: Path) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, and a change and a folder of data beside it."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "model.py").write_text("old = True\n")
    git("init", "-q", "-b", "main", folder=folder)
    git("add", "-A", folder=folder)
    git("commit", "-qm", "first", folder=folder)
    (folder / "src" / "model.py").write_text("old = False\n")
    (folder / "data").mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_base_is_stored_and_an_unchanged_branch_passes_against_it(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["scripts/check/__main__.py"]
    )  # whether pytest was started as a script or a module
    command = ["task=micro", "compile=regional,[regional,cuda_graph]", "--rounds", "2"]
    assert main(["--update", *command]) == 0
    assert cells.titles == ["eager", "regional", "[regional,cuda_graph]"] * 2
    words = cells.ran[1].command
    assert words[:3] == [sys.executable, "-m", "trainer"]
    assert words[3:-1] == [
        *("task=micro", "trainer.max_steps=60", "trainer.val_every_n_steps=0"),
        *("trainer.checkpoint_every_n_steps=null", "trainer.progress=none", "compile=regional"),
    ]
    assert [one.arm for one in load(tmp_path / "crucible-check.json")] == ["regional", "regional+cuda_graph"]
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("passed: nothing is worse than crucible-check.json\n")


def test_a_new_break_fails_with_its_line_in_the_comment(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--update", "task=micro", "--base", "base.json"]) == 0
    cells.events = [BREAK]
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert main(["task=micro", "--base", "base.json", "--comment", "comment.md"]) == 1
    text = (tmp_path / "comment.md").read_text()
    assert (tmp_path / "summary.md").read_text() == text
    lines = [line for line in text.splitlines() if line]
    assert lines[1:3] == ["### ❌ crucible check failed", "**1 more graph break.**"]
    assert "| graph breaks | 0 | 1 | ❌ 1 more |" in lines
    assert "**New graph break** at `/project/model.py:9 in forward`" in lines
    assert "> print is not traced" in lines
    assert capsys.readouterr().out.count("new graph break: /project/model.py:9 in forward") == 1


def test_copies_of_a_block_that_do_not_compile_for_one_reason_are_one_line(
    cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {f"net.blocks.{number}": "print is not traced (model.py:9)" for number in range(12)}
    cells.changes = {"eager_parts": parts}
    assert main(["task=micro"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "failed: checks are not clean: net.blocks.0 runs eager and 11 more"
    names = ", ".join(f"net.blocks.{number} runs eager" for number in range(3))
    assert [line for line in lines if line.startswith("  not clean: ")] == [
        f"  not clean: {names} and 9 more: print is not traced (model.py:9)"
    ]


def test_a_step_that_looks_slower_is_looked_at_again(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--update", "task=micro"]) == 0
    cells.ran.clear()
    cells.seconds = lambda cell: 0.1
    assert main(["task=micro"]) == 1
    assert len(cells.ran) == 3 * 2 * 3
    output, errors = capsys.readouterr()
    assert errors.count("a step looks slower: 3 rounds more, as it counts when it shows 3 times") == 2
    assert "failed: the step beside eager is 10" in output
    cells.ran.clear()
    cells.seconds = lambda cell: 0.1 if "eager" in cell.title or len(cells.ran) <= 6 else 0.05
    assert main(["task=micro"]) == 0, "three slow rounds that do not come again"
    assert "note: the step was looked at 2 times" in capsys.readouterr().out
    cells.ran.clear()
    cells.seconds = lambda cell: 0.1
    assert main(["task=micro", "--rounds", "1"]) == 0
    assert len(cells.ran) == 2, "one round is for the counts"


def test_a_commit_is_run_in_turns_from_a_folder_that_goes_away(cells: Cells, repository: Path) -> None:
    seen: list[tuple[str, str]] = []

    def seconds(cell: PlannedCell) -> float:
        seen.append((cell.title, (cell.folder / "src" / "model.py").read_text()))
        return 0.1 if "of base" not in cell.title else 0.05

    cells.seconds = seconds
    main(["--base", "main", "task=micro", "+task.data.root=data", f"+task.code={repository / 'src'}"])
    names = ["regional of base", "eager", "regional"]
    assert cells.titles == [*names * 3, *["regional of base", "regional"] * 6], "slower by half: looked at again"
    assert dict(seen) == {"regional of base": "old = True\n", "eager": "old = False\n", "regional": "old = False\n"}
    base, this = cells.ran[0], cells.ran[2]
    assert not base.folder.exists()
    assert git("worktree", "list", folder=repository).count("\n") == 0
    assert f"+task.data.root={repository / 'data'}" in base.command, "what the commit does not have"
    assert f"+task.code={base.folder / 'src'}" in base.command
    assert "+task.data.root=data" in this.command
    assert base.variables["PYTHONPATH"].split(os.pathsep)[0] == str(base.folder / "src")


def test_a_record_of_another_branch_is_read_from_git(
    cells: Cells, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--update", "task=micro"]) == 0
    git("add", "crucible-check.json", folder=repository)
    git("commit", "-qm", "record", folder=repository)
    (repository / "crucible-check.json").unlink()
    assert main(["task=micro", "--base", "main:crucible-check.json"]) == 0
    assert "nothing is worse than main:crucible-check.json" in capsys.readouterr().out
    assert main(["task=micro", "--base", "main:none.json"]) == 2
    assert "--base=main:none.json: main has no file none.json" in capsys.readouterr().err


def test_a_base_that_does_not_run_is_said(cells: Cells, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = record("regional", status="failed", reason="no such option", device="AMD EPYC", device_type="cpu")
    cells.broken = lambda cell: failed if "of base" in cell.title else None
    assert main(["--base", "main", "task=micro"]) == 0
    assert cells.titles.count("regional of base") == 1, "and it is not tried again"
    output = capsys.readouterr().out
    assert output.startswith("passed: checks are clean, and main has nothing to compare with of ")
    assert "note: the base did not run: failed: no such option" in output


def test_runs_that_are_there_are_judged_and_nothing_is_trained(cells: Cells, tmp_path: Path) -> None:
    save([record("eager"), record("regional", step_seconds=0.05)], tmp_path / "base")
    save([record("eager"), record("regional", step_seconds=0.05, events=[BREAK])], tmp_path / "this")
    assert main(["--runs", "base", "--base", "base"]) == 0
    assert main(["--runs", "this", "--base", "base"]) == 1
    assert cells.ran == []


def test_a_commit_is_no_base_for_runs_that_are_there(
    cells: Cells, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save([record("eager"), record("regional")], repository / "this")
    assert main(["--runs", "this", "--base", "main"]) == 2
    assert "--base=main: a commit has to be run, and --runs trains nothing" in capsys.readouterr().err


def test_a_failed_run_is_not_stored(cells: Cells, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells.broken = lambda cell: record("regional", status="failed", reason="no") if "regional" in cell.title else None
    assert main(["--update", "task=micro"]) == 1
    assert not (tmp_path / "crucible-check.json").exists()
    assert len(cells.ran) == 2, "what failed is not run again"
    assert "did not finish: failed: no" in capsys.readouterr().out


def test_a_run_that_dies_before_its_first_record_fails_the_check(
    cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = RunRecord(task="eager", status="failed", reason="killed (SIGKILL)")
    cells.broken = lambda cell: dead
    assert main(["task=micro"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("failed: 1 run did not finish\n")
    assert "did not finish: failed: killed (SIGKILL)" in output


def test_what_the_trainer_refuses_is_refused(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    cells.broken = lambda cell: record("eager", status="failed", reason="refused: task=mikro is not an option")
    assert main(["task=mikro"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: task=mikro is not an option"
    assert len(cells.ran) == 1


def test_the_workflow_to_copy_uses_options_and_the_mark_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "ci" / "crucible-check.yml").read_text(encoding="utf-8")
    steps = yaml.safe_load(text)["jobs"]["check"]["steps"]
    commands = [
        line for step in steps for line in step.get("run", "").splitlines() if re.match(" *crucible check", line)
    ]
    flags = {word for line in commands for word in line.split() if word.startswith("--")}
    with pytest.raises(SystemExit):
        main(["--help"])
    assert flags
    assert flags <= set(capsys.readouterr().out.split())
    assert f'startswith("{MARK}")' in text
    assert FILE_NAME in text


# ---- processes -------------------------------------------------------------------------------------------------------

SCRIPT = f"""
import os, sys
from pathlib import Path
from tests.report.records import record
from trainer.telemetry.record import RunVerdict
folder = Path(os.environ["{RECORDS_VARIABLE}"])
if sys.argv[1:] == ["--compile"]:
    made = record("regional", script="train.py", device="AMD EPYC", device_type="cpu")
    made.verdict = RunVerdict(outcome="faster", ratio=1.5)
    made.save(folder)
"""


def check(*arguments: str, folder: Path) -> Ended:
    return python("-m", "scripts.check", "--rounds", "1", *arguments, cwd=folder, path=(STAND_IN, ROOT))


@pytest.mark.slow
def test_real_processes_leave_a_base_record(tmp_path: Path) -> None:
    done = check("--update", "task=micro", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = load(tmp_path / "crucible-check.json")
    assert (one.arm, one.rounds[0].step_seconds, one.rounds[0].share_of_eager) == ("regional", 0.5, 0.5)
    refused = check("task=mikro", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: task=mikro is not an option")


@pytest.mark.slow
def test_a_script_is_run_with_its_arguments_and_its_speed_is_that_of_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = check("--update", "--", "train.py", "--compile", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "crucible-check.json").read_text())
    assert values["measured"][0]["rounds"][0]["share_of_eager"] == pytest.approx(1 / 1.5)
    without = check("--", "train.py", folder=tmp_path)
    assert without.returncode == 2
    assert "error: train.py: has left no record; Compile([...])" in without.stderr
