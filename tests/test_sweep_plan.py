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
    in_order,
    name_by_difference,
    quoted,
    with_arms,
)
from trainer.telemetry.record import RunRecord


def planned(text: str) -> PlannedCell:
    ((overrides, arm),) = with_arms(text.split(), [])
    start = next((word.partition("=")[2] for word in overrides if word.startswith("repeat=")), None)
    return PlannedCell(overrides=overrides, arm=arm, job=0, record=RunRecord(task="toy", start=start))


def texts(cells: list[PlannedCell]) -> list[str]:
    return [" ".join(cell.overrides) for cell in cells]


def test_a_cold_cell_comes_right_before_its_warm_twin_however_they_were_asked_for() -> None:
    cells = [planned(f"repeat={start} compile={arm}") for start in ("warm", "cold") for arm in ("a", "b")]
    ordered = in_order(cells, rounds=1)
    assert [(cell.arm, cell.record.start) for cell in ordered] == [
        ((f"compile={arm}",), start) for arm in ("a", "b") for start in ("cold", "warm")
    ]


def test_arms_take_turns_within_each_seed() -> None:
    cells = [planned(f"compile={arm} seed={seed}") for arm in ("a", "b") for seed in (0, 1)]
    turns = in_order(cells, rounds=1)
    assert texts(turns) == ["compile=a seed=0", "compile=b seed=0", "compile=a seed=1", "compile=b seed=1"]


def test_every_cell_has_a_turn_in_each_round() -> None:
    ordered = in_order([planned("compile=a"), planned("compile=b")], rounds=3)
    assert [(cell.arm[0][-1], cell.record.round) for cell in ordered] == [
        (arm, number) for number in (1, 2, 3) for arm in "ab"
    ]
    name_by_difference(ordered)
    assert ordered[-1].title == "compile=b round=3"


def test_an_arm_is_a_value_of_compile_with_further_overrides() -> None:
    arms = ["eager", "[whole,cached] compile.whole.mode=max-autotune task.data.pad_to=64"]
    (eager, _), (overrides, arm) = with_arms(["seed=1"], arms)
    assert eager == ("seed=1", "compile=eager")
    assert overrides == ("seed=1", *arm)
    assert arm == ("compile=[whole,cached]", "compile.whole.mode=max-autotune", "task.data.pad_to=64")


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
