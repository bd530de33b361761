"""Records: found in files, folders at any depth and globs, each once; read whole, or named where they cannot be."""

from __future__ import annotations

import json
import math
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest

from scripts import compare
from tasks.micro.task import DIMENSIONS, Micro
from tests.report.records import record
from trainer.report.runs import find
from trainer.run_start import initial_record
from trainer.settings import Config
from trainer.telemetry.record import Event, RunRecord


def written(folder: Path, arm: str = "eager") -> Path:
    folder.mkdir(parents=True)
    record(arm).save(folder)
    return folder


def test_files_folders_globs_and_trees_are_searched_and_each_run_is_found_once(tmp_path: Path) -> None:
    first = written(tmp_path / "sweep" / "0-compile=[eager]")
    second = written(tmp_path / "sweep" / "deeper" / "1-compile=whole", "whole")
    paths = [first, first / "record.json", str(tmp_path / "sw*"), tmp_path]
    assert [run.directory for run in find(paths)] == [first, second]
    for paths in ([tmp_path], tmp_path, str(tmp_path)):
        assert [run.record.label for run in find(paths)] == ["eager", "whole"]


def test_folders_of_runs_may_be_links(tmp_path: Path) -> None:
    run = written(tmp_path / "elsewhere" / "run")
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "linked").symlink_to(run)
    (tmp_path / "chosen" / "back").symlink_to("..")
    (tmp_path / "whole").symlink_to("elsewhere")
    assert [one.directory for one in find([tmp_path / "whole"])] == [tmp_path / "whole" / "run"]
    assert [one.directory for one in find([tmp_path / "chosen"])] == [tmp_path / "chosen" / "linked"]


def test_a_broken_record_is_an_error_by_name_and_told_when_a_search_comes_upon_it(tmp_path: Path) -> None:
    written(tmp_path / "good")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "record.json").write_text("{")
    told: list[str] = []
    assert len(find([tmp_path], unreadable=told.append)) == 1
    assert len(told) == 1
    assert "half/record.json: not a run record" in told[0]
    with pytest.raises(ValueError, match="not a run record"):
        find([tmp_path / "half"], unreadable=told.append)
    with pytest.raises(ValueError, match="not a run record"):
        find([tmp_path])


WRONG: dict[str, tuple[Any, str]] = {
    "null": (None, "the whole is null, not an object"),
    "a list": ([], "the whole is a list, not an object"),
    "text for a number": ({"steady_step_seconds_mean": "fast"}, "steady_step_seconds_mean is a str, not float"),
    "null for a mapping": ({"config": None}, "config is null, not dict"),
    "a number in a list": ({"notes": ["one", 2]}, r"notes\[1\] is a int, not str"),
    "an event without a kind": ({"events": [{"reason": "x"}]}, "kind"),
    "an event of a wrong type": ({"events": [{"kind": 1, "reason": "x"}]}, r"events\[0\]\.kind is a int, not str"),
    "a strategy without a name": ({"strategies": [{}]}, "a strategy has no name"),
    "truth for a number": ({"steps": True}, "steps is a bool, not int"),
    "beyond all range": ({"compile_seconds": 10**400}, "compile_seconds is out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_of_wrong_types_is_left_out_of_a_comparison_and_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("eager", "whole"):
        written(tmp_path / arm, arm)
    file = written(tmp_path / "wrong") / "record.json"
    values, said = WRONG[name]
    file.write_text(json.dumps({**json.loads(file.read_text()), **values} if isinstance(values, dict) else values))
    assert compare.main([str(tmp_path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"left out: {file}: not a run record \(.*{said}.*\)$", line), line
    assert compare.main([str(file)]) == 2, "by its own name it is what was asked for"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"task": "\xe4"}', "byte 0xe4 in position 10"),
        (b'{"task": ' + b"1" * 10_000 + b"}", "limit"),
    ],
)
def test_a_file_that_is_no_text_or_nested_without_end_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"\.json: not a .*{said}"):
        RunRecord.load(tmp_path)


def test_numbers_that_are_none_are_read_as_none(tmp_path: Path) -> None:
    found = record("eager")
    found.final_loss, found.final_metrics = math.nan, {"val/loss": math.inf}
    found.save(tmp_path)
    read = RunRecord.load(tmp_path)
    assert read.final_loss is None
    assert read.final_metrics["val/loss"] is None


def test_a_record_of_micro_says_which_of_its_models_it_is_of() -> None:
    named = [initial_record(Config(task=Micro(model=model)), []).task for model in DIMENSIONS]
    assert named == [f"micro {model}" for model in DIMENSIONS]


def test_a_record_reads_back_without_what_it_has_no_field_for(tmp_path: Path) -> None:
    event = Event(kind="recompile", reason="size", phase="validating")
    record = RunRecord(task="any", warmup_seconds=2.5, events=[event])
    text = record.save(tmp_path).read_text()
    assert RunRecord.load(tmp_path) == record
    (tmp_path / "record.json").write_text(json.dumps({**json.loads(text), "of_another_version": 1.0}))
    assert RunRecord.load(tmp_path) == record


def test_a_report_of_any_mapping_is_saved_and_what_is_not_finite_in_it_is_absent(tmp_path: Path) -> None:
    """A strategy of someone else's may report what Hydra or a library of theirs gives it."""
    record = RunRecord(task="any", report={"mine": {"options": UserDict(limit=float("inf"), password=float("inf"))}})
    record.save(tmp_path)
    assert RunRecord.load(tmp_path).report == {"mine": {"options": {"limit": None, "password": "***"}}}
