"""The sweep: every cell in a process of its own, and no cell's end is the sweep's."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.launcher import _directory_name, _quoted, _varied

SWEEP = ["-m", "hydra.sweep.dir=sweep"]


def records(sweep: Path) -> dict[str, dict[str, Any]]:
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(sweep.glob("*/record.json"))}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)


def test_every_cell_is_a_process_of_its_own_and_the_table_compares_with_eager(
    start_trainer: Any, tmp_path: Path
) -> None:
    process = start_trainer([*SWEEP, "compile=eager,whole", "trainer.max_steps=7"], cwd=tmp_path)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    cells = records(tmp_path / "sweep")
    assert list(cells) == ["0-compile=eager", "1-compile=whole"]
    assert len({cell["config"]["pid"] for cell in cells.values()}) == 2
    assert all(cell["config"]["max_steps"] == 7 for cell in cells.values())
    assert "[2/2] compile=whole -> sweep/1-compile=whole" in output
    table = output.splitlines()[-4:]
    assert table[1].split()[:4] == ["compile=eager", "finished", "1.00", "1.00x"]
    assert table[2].split()[:4] == ["compile=whole", "finished", "2.00", "2.00x"]
    assert table[3] == "tensorboard --logdir sweep"


def test_failing_crashing_killed_and_refused_cells_do_not_end_the_sweep(start_trainer: Any, tmp_path: Path) -> None:
    process = start_trainer([*SWEEP, "seed=1,2,3,4,0"], cwd=tmp_path)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    statuses = {line.split()[0]: line for line in output.splitlines() if line.startswith("seed=")}
    assert "failed" in statuses["seed=1:"] or "failed" in statuses["seed=1"]
    assert "crashed (exit code 7)" in statuses["seed=2"]
    assert "killed (SIGKILL)" in statuses["seed=3"]
    assert "refused" in statuses["seed=4"]
    assert "finished" in statuses["seed=0"]
    assert "seed=1: RuntimeError: loss is not finite" in output
    assert "error: task.data.root='' must name a folder" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_running_cell_end_and_starts_no_other(
    start_trainer: Any, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_trainer([*SWEEP, "seed=0,5,0", "trainer.max_steps=1,2"], cwd=tmp_path)
    wait_for(tmp_path / "sweep" / "2-seed=5,trainer.max_steps=1" / "waiting")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches every process of the terminal
    else:
        process.send_signal(number)  # a job manager's SIGTERM only the sweep's
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert records(tmp_path / "sweep")["2-seed=5,trainer.max_steps=1"]["reason"] == number.name
    assert "stopped after 3 of 6 cells" in output
    assert "Traceback" not in errors


def test_a_sweep_directory_used_again_shows_no_figures_of_the_sweep_before(start_trainer: Any, tmp_path: Path) -> None:
    old = tmp_path / "sweep" / "0-seed=2" / "record.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps({"schema": 1, "task": "old", "events": [], "steady_steps_per_second": 99.0}))
    process = start_trainer([*SWEEP, "seed=2,0"], cwd=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "99.00" not in output


def test_overrides_reach_the_cells_as_they_were_written(start_trainer: Any, tmp_path: Path) -> None:
    text = "a b, c=[d] 'e'"
    process = start_trainer([*SWEEP, "task/data=coco", f'task.data.root="{text}"', "seed=7,8"], cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    for cell in records(tmp_path / "sweep").values():
        assert f'task.data.root="{text}"' in cell["command"]


def test_a_sweep_named_in_an_experiment_runs_its_cells_once(start_trainer: Any, tmp_path: Path) -> None:
    experiment = tmp_path / "mine" / "experiment" / "arms.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweep: {dir: sweep}\n  sweeper: {params: {seed: '7,8'}}\n"
    )
    process = start_trainer(["--config-dir", "mine", "experiment=arms"], cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert list(records(tmp_path / "sweep")) == ["0-seed=7", "1-seed=8"]


def test_a_misspelt_option_stops_the_sweep_before_the_first_cell(start_trainer: Any, tmp_path: Path) -> None:
    process = start_trainer([*SWEEP, "compile=eager,hole"], cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Could not find 'compile/hole'" in errors
    assert not records(tmp_path / "sweep")


def test_cells_are_named_by_what_differs() -> None:
    cells = [["seed=1", "compile=eager", "a=b"], ["seed=1", "compile=[regional,mine]", "a=b"]]
    assert _varied(cells) == {"compile=eager", "compile=[regional,mine]"}
    assert _varied([["seed=1"]]) == {"seed=1"}
    assert _directory_name(["compile=[regional,mine]", "task.data.root='/a b'"]) == (
        "compile=regional+mine,task.data.root=_a_b"
    )
    assert len(_directory_name(["x" * 500])) == 120


@pytest.mark.parametrize("value", ["plain", "with space", "it's", "a,b=[c]{d}", "back\\slash", "end\\"])
def test_quoted_values_survive_hydras_grammar(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"key={_quoted(value)}")
    assert override.value() == value
