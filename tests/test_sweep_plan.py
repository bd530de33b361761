"""The plan of a sweep: order, pairs, names; no process is started here."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from trainer.sweep.plan import (
    PlannedCell,
    SweepOptions,
    again,
    alone,
    directory_name,
    expanded,
    name_by_difference,
    quoted,
    with_arms,
)
from trainer.telemetry.record import RunRecord


def planned(text: str) -> PlannedCell:
    ((overrides, arm),) = with_arms(text.split(), [])
    return PlannedCell(overrides=overrides, arm=arm, job=0, record=RunRecord(task="toy"))


def test_cells_are_named_by_what_differs() -> None:
    cells = [planned(text) for text in ("seed=1 compile=eager a=b", "seed=1 compile=[regional,mine] a=b")]
    name_by_difference(cells)
    assert [cell.chosen for cell in cells] == [["compile=eager"], ["compile=[regional,mine]"]]
    name_by_difference(cells[:1])
    assert cells[0].title == "seed=1 compile=eager a=b"
    assert directory_name(["compile=[regional,mine]", "task.data.root='/a b'"]) == (
        "compile=regional+mine,task.data.root=_a_b"
    )
    assert len(directory_name(["x" * 500])) == 120


@pytest.mark.parametrize(
    "value", ["plain", "with space", "it's", 'a "word"', 'a\\"b', "a,b=[c]{d}", "back\\slash", "end\\"]
)
def test_quoted_values_survive_hydras_grammar(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"key={quoted(value)}")
    assert override.value() == value


def test_a_directory_belongs_to_one_sweep_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def second() -> None:
        with alone(tmp_path):
            entered.set()

    thread = threading.Thread(target=second, daemon=True)
    with alone(tmp_path):
        thread.start()
        while "waiting for the sweep" not in capsys.readouterr().out:
            assert not entered.is_set()
            time.sleep(0.01)
        # A cell that outlives its sweep has the lock still.
        cell = subprocess.Popen(["sleep", "1000"], close_fds=False)
    assert not entered.wait(0.2)
    cell.kill()
    cell.wait()
    assert entered.wait(60)
    thread.join()


def test_a_sweep_is_continued_by_its_own_command_and_runs_nothing_that_a_file_alone_names(tmp_path: Path) -> None:
    sweep = tmp_path / "a sweep"
    typed = ["-m", "compile=eager,whole", "--config-dir", "mine", f"sweep={sweep}"]
    passed = expanded(typed)
    assert passed == ["-m", "compile=eager,whole", "--config-dir", "mine", f'hydra.sweep.dir="{sweep}"']
    assert shlex.split(again(passed, sweep)) == ["python", "-m", "trainer", *typed]
    with pytest.raises(ValueError, match=r"give the whole command; that of a sweep is in its multirun\.yaml$"):
        expanded(["-m", f"sweep={sweep}"])
    assert expanded(["seed=1"]) == ["seed=1"]


def test_what_a_sweeper_is_to_get_is_a_figure_of_the_record() -> None:
    with pytest.raises(ValueError, match=r"^hydra\.launcher\.objective='loss' is not a figure of a record$"):
        SweepOptions(objective="loss")
