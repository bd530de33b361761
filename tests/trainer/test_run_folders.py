"""Folders of runs: one for each run, however many begin at once, and none over another's work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import trainer_process
from trainer import run_files
from trainer.run_files import claim
from trainer.telemetry.record import RunRecord


def test_runs_that_begin_at_once_have_a_folder_each(tmp_path: Path) -> None:
    runs = [trainer_process([f"seed={seed}", "trainer.max_steps=7"], cwd=tmp_path) for seed in (10, 11, 12)]
    for run in runs:
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
    found = {RunRecord.load(file.parent).seed: file.parent for file in (tmp_path / "outputs").rglob("record.json")}
    assert sorted(found) == [10, 11, 12]
    for seed, folder in found.items():
        assert f"seed={seed}" in (folder / ".hydra" / "overrides.yaml").read_text()


def test_a_sweep_has_one_folder(tmp_path: Path) -> None:
    sweep = trainer_process(["-m", "compile=eager"], cwd=tmp_path)
    _, errors = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, errors
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert {file.name for file in folder.iterdir()} >= {"multirun.yaml", "0-compile=eager"}


def finished(folder: Path) -> None:
    RunRecord(task="line", status="finished", steps=6).save(folder)


def killed(folder: Path) -> None:
    RunRecord(task="line").save(folder)


def failed(folder: Path) -> None:
    RunRecord(task="line", status="failed").save(folder)
    (folder / "error.log").touch()


def unreadable(folder: Path) -> None:
    folder.mkdir()
    (folder / "record.json").write_text("{")


def checkpoint_alone(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("left", "resume"),
    [(finished, "elsewhere"), *((left, None) for left in (finished, killed, failed, unreadable, checkpoint_alone))],
)
def test_a_folder_with_another_runs_work_is_refused_and_stays_as_it_is(
    command_line: Any,
    called: list[Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    left: Any,
    resume: str | None,
) -> None:
    left(tmp_path / "run")
    before = contents(tmp_path / "run")
    assert command_line("hydra.run.dir=run", *([f"resume={resume}"] if resume else [])) == 2
    (said,) = capfd.readouterr().err.splitlines()
    what = "checkpoint" if left is checkpoint_alone else "record"
    folder = tmp_path / "run"
    assert said == (
        f"error: hydra.run.dir={folder}: holds the {what} of another run; choose another folder, "
        f"or continue that run by {shlex.quote(f'resume={folder}')}"
    )
    assert contents(folder) == before
    assert called == []


@pytest.mark.parametrize(
    ("left", "name", "within"),
    [
        (finished, "run", ""),
        (killed, "run", "/checkpoints/last.ckpt"),
        (checkpoint_alone, "run", "/checkpoints"),
        (killed, "0-compile=eager,seed=1 ü", ""),
    ],
    ids=["resumed", "resumed by its file", "resumed without a record", "a name that Hydra does not read"],
)
def test_a_folder_of_the_resumed_run_is_written_into(
    command_line: Any,
    called: list[Any],
    tmp_path: Path,
    left: Any,
    name: str,
    within: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.settings.find_checkpoint", lambda resume: None)  # there is none to go on from
    left(tmp_path / name)
    assert command_line(f'hydra.run.dir="{name}"', f"resume={name}{within}") == 0
    assert called[0]["run_dir"] == tmp_path / name
    assert called[0]["config"].resume == f"{name}{within}"


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_PROCID"])
def test_only_the_first_process_claims(
    command_line: Any, called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    finished(tmp_path / "run")  # the first process's, which has begun meanwhile
    before = contents(tmp_path)
    assert command_line("hydra.run.dir=run") == 0
    assert command_line() == 0
    assert contents(tmp_path) == before


def test_of_two_runs_that_claim_a_folder_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "taken", lambda folder, resume: None)  # both have looked before either wrote
    assert claim(RunRecord(task="first"), tmp_path, None) is None
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: None)
    with pytest.raises(ValueError, match="another run has just started in it"):
        claim(RunRecord(task="second"), tmp_path, None)
    assert json.loads((tmp_path / "record.json").read_text())["task"] == "first"


def a_file(folder: Path) -> str:
    folder.touch()
    return "File exists"


def below_a_file(folder: Path) -> str:
    folder.parent.rmdir()
    folder.parent.touch()
    return "Not a directory"


@pytest.mark.parametrize("make", [a_file, below_a_file], ids=["a file", "below a file"])
def test_a_folder_that_cannot_be_made_is_one_line(
    command_line: Any, called: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Any
) -> None:
    (tmp_path / "runs").mkdir()
    reason = make(tmp_path / "runs" / "one")
    assert command_line("hydra.run.dir=runs/one") == 2
    assert capfd.readouterr().err == f"error: hydra.run.dir=runs/one: {reason}\n"
    assert called == []


def test_a_disk_that_is_full_before_the_start_is_one_line(
    command_line: Any, called: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hydra.core.utils

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hydra.core.utils, "_save_config", full)
    assert command_line("hydra.run.dir=run") == 2
    assert capfd.readouterr().err == "error: hydra.run.dir=run: No space left on device\n"
    assert called == []
