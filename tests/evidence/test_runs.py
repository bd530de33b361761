"""Finding records: files, run folders, folders at any depth, globs; each once, none without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evidence.records import record
from trainer.evidence.runs import find


def written(folder: Path, arm: str = "eager") -> Path:
    folder.mkdir(parents=True)
    record(arm).save(folder)
    return folder


def test_files_folders_globs_and_trees_are_searched_and_each_run_is_found_once(tmp_path: Path) -> None:
    first = written(tmp_path / "sweep" / "0-compile=[eager]")
    second = written(tmp_path / "sweep" / "deeper" / "1-compile=whole", "whole")
    paths = [first, first / "record.json", str(tmp_path / "sw*"), tmp_path]
    assert [run.directory for run in find(paths)] == [first, second]
    assert [run.record.label for run in find([tmp_path])] == ["eager", "whole"]


@pytest.mark.parametrize(
    ("path", "said"), [("none", "none: no such file or folder"), ("empty", "empty: no record.json in it or below")]
)
def test_a_path_that_holds_no_record_is_named(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(ValueError, match=said):
        find([path])


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
