"""What a run leaves holds no credentials, and what others have written neither runs nor speaks for us unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from strategies.cached.store import read_key
from strategies.compile_errors import one_line, redact
from tests.processes import python
from tests.report.records import record
from trainer.config import compose
from trainer.report import tables
from trainer.report.comparison import compare_runs as compare
from trainer.report.run_verdict import run_verdict, verdict_lines
from trainer.report.runs import find
from trainer.run_start import initial_record
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.tensorboard import events_table, hyperparameters

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202e\ud800"
STORE = "+compile.cached.storage_options"

# ---- credentials ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compile=cached", f"{STORE}.headers.Authorization=hush"], "compile.cached.storage_options.headers.Authori"),
        (["compile=cached", STORE + "={auth:[me,hush]}"], "compile.cached.storage_options.auth"),
        (["compile=cached", "compile.cached.url='s3://me:hush@host/x'"], "compile.cached.url"),
        (["resume='https://me:hush@host/x'"], "resume"),
        (["-m", "compile=cached", f"{STORE}.sas=hush,hush2"], "compile.cached.storage_options.sas"),
        (["-m", "compile=cached", STORE + "={sas:hush},{sas:hush2}"], "compile.cached.storage_options"),
        (["-m", 'hydra.launcher.arms=["cached compile.cached.storage_options.auth=hush"]'], "hydra.launcher.arms"),
        (["--config-dir", "mine", "experiment=theirs"], "resume"),
    ],
)
def test_credentials_reach_no_file(
    arguments: list[str],
    named: str,
    called: list[dict[str, object]],
    command_line: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/theirs.yaml").write_text("# @package _global_\nresume: http://me:hush@host/x\n")
    assert command_line(*arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {named}"), said
    assert "must not hold credentials" in said
    assert "hush" not in said
    assert called == []
    assert [path.name for path in Path().rglob("*") if path.is_file()] == ["theirs.yaml"], "Hydra wrote nothing either"


def test_credentials_of_the_environment_are_used_and_not_written(
    called: list[dict[str, object]],
    command_line: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ADDRESS", "https://me:hush@host/x")
    monkeypatch.setattr("trainer.settings.find_checkpoint", lambda resume: None)  # there is none at that address
    assert command_line("resume=${oc.env:ADDRESS}", "hydra.run.dir=run") == 0
    config = called[0]["config"]
    assert config.resume == "https://me:hush@host/x"  # type: ignore[attr-defined]
    made = initial_record(config, ["resume=https://me:hush@host/x"])  # type: ignore[arg-type]
    made.notes.append("GET https://me:hush@host/x")
    made.reason = one_line(ConnectionError("https://me:hush@host/x: 403"))
    assert "hush" not in json.dumps([made.config, made.command, made.reason]), "what TensorBoard and the console show"
    made.report["mine"] = {"mirror": "https://me:hush@host/x"}
    assert "hush" not in events_table([Event(kind="fallback", reason="https://me:hush@host/x")])
    made.save(tmp_path / "run")
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"record.json", "config.yaml", "overrides.yaml"} <= {path.name for path in written}
    assert not any("hush" in path.read_text() for path in written)
    assert RunRecord.load(tmp_path / "run").config["resume"] == "***"
    assert called[0]["command"] == ["resume=${oc.env:ADDRESS}"]


def test_text_of_the_environment_within_a_longer_value_is_used_and_not_written(
    called: list[dict[str, object]],
    command_line: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HUSHED", "plain words that name nothing")
    monkeypatch.setenv("FEW", "five5")
    monkeypatch.setenv("FOLDER", str(tmp_path))  # in whose place no command could be pasted
    text = "before ${oc.env:HUSHED} after ${oc.env:FEW} in ${oc.env:FOLDER} and ${oc.env:NOT_SET,by default}"
    assert command_line("compile=whole", "hydra.run.dir=run", f"+compile.whole.options={{note:'{text}'}}") == 0
    config, command = called[0]["config"], called[0]["command"]
    meant = f"before plain words that name nothing after five5 in {tmp_path} and by default"
    assert config.compile["whole"].options == {"note": meant}  # type: ignore[attr-defined]
    assert f"+compile.whole.options={{note:'{text}'}}" in command  # type: ignore[operator]
    made = initial_record(config, command)  # type: ignore[arg-type]
    shown = f"before *** after five5 in {tmp_path} and by default"
    assert made.config["compile"]["whole"]["options"] == {"note": shown}, "what TensorBoard gets"
    assert "plain words" not in json.dumps(row_texts := hyperparameters(made))
    assert shown in str(row_texts)
    made.status, made.notes = "finished", [f"the compiler said: {meant}"]
    made.reason = one_line(RuntimeError(meant))
    made.save(tmp_path / "run")
    made.verdict = run_verdict(made)
    assert "${oc.env:HUSHED}" in verdict_lines(made)[-1], "which can be pasted"
    told = [*(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()), *verdict_lines(made)]
    assert not any("plain words" in each for each in told)
    with pytest.raises(ValueError, match="is not one of") as refused:
        compose(["compile=whole", "compile.whole.mode=${oc.env:HUSHED}"])
    assert "plain words" not in redact(str(refused.value))
    compose(["+compile.whole.options={note:'plain words that name nothing'}", "compile=whole"])  # is not refused


def test_scripts_refuse_credentials_as_the_command_line_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^resume must not hold credentials"):
        compose(["resume='https://me:hush@host/x'"])
    monkeypatch.setenv("CRUCIBLE_CACHE_URL", "s3://me:hush@host/x")
    with pytest.raises(ValueError, match=r"^CRUCIBLE_CACHE_URL must not hold credentials"):
        compose(["compile=cached"]).compile["cached"].check()


# ---- keys and caches -----------------------------------------------------------------------------------------------


def test_a_key_that_others_can_read_or_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("a secret of the team")
    for mode in (0o644, 0o640, 0o602):
        key.chmod(mode)
        with pytest.raises(ValueError, match=r"^--key-file=.*: other users may read or write it; chmod go= /"):
            read_key("--key-file", str(key))
    key.chmod(0o400)
    assert read_key("--key-file", str(key)) == b"a secret of the team"
    monkeypatch.setattr(os, "getuid", lambda: key.stat().st_uid + 1)
    with pytest.raises(ValueError, match="it belongs to another user"):
        read_key("--key-file", str(key))


# ---- what others wrote ---------------------------------------------------------------------------------------------


def test_a_foreign_record_cannot_speak_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from scripts.compare import main

    for name, arm in (("a", "eager"), (f"b{ESCAPES[:-1]}", "whole"), ("c", "regional")):
        made = record(arm, step_seconds=0.01)
        made.task, made.device = f"mine{ESCAPES}\nverdict: forged", f"H200{ESCAPES}"
        if arm != "eager":
            made.label += ESCAPES
        made.reason, made.status = (f"no{ESCAPES}\nmore", "failed") if arm == "whole" else (None, "finished")
        made.config[f"key{ESCAPES}"] = ESCAPES
        made.save(tmp_path / name)
    broken = tmp_path / f"d{ESCAPES[:-1]}"
    broken.mkdir()
    (broken / "record.json").write_text("{}")
    assert main([str(tmp_path)]) == 0
    told = capfd.readouterr()
    everything = told.out + told.err + tables.markdown(compare(find([tmp_path], unreadable=lambda reason: None)))
    assert not set(ESCAPES) & set(everything) - set("0;title[2J31m]")
    assert "\nverdict: forged" not in everything
    assert "mine]0;title[2J31m verdict: forged" in told.out
    assert "left out: " in told.err


@pytest.mark.parametrize("command", [["trainer", "seed=x"], ["scripts.compare", "nothing"]], ids=lambda each: each[0])
def test_files_of_the_working_directory_hide_no_modules(command: list[str], tmp_path: Path) -> None:
    for name in ("random", "tasks", "strategies", "hydra", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('theirs ran')")
    done = python("-m", *command, cwd=tmp_path)
    warned, *said = done.stderr.splitlines()
    assert warned.startswith(f"warning: {tmp_path / 'random.py'} has the name of a module of Python's own")
    assert said[0].startswith("error: ")
    assert "theirs ran" not in done.stderr
