"""The sweep: every cell in a process of its own, and no cell's end is the sweep's."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SWEEP = ["-m", "hydra.sweep.dir=sweep"]


def records(sweep: Path) -> dict[str, dict[str, Any]]:
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(sweep.glob("*/record.json"))}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)


def test_every_cell_is_a_process_with_caches_of_its_own_and_the_table_compares_with_eager(
    start_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUCIBLE_CACHE_URL", "/the/users/store")
    process = start_trainer([*SWEEP, "compile=eager,whole,cached", "trainer.max_steps=7"], cwd=tmp_path)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    cells = records(tmp_path / "sweep")
    assert list(cells) == ["0-compile=eager", "1-compile=whole", "2-compile=cached"]
    assert len({cell["config"]["pid"] for cell in cells.values()}) == 3
    assert all(cell["config"]["max_steps"] == 7 for cell in cells.values())
    assert [cell["config"]["found"] for cell in cells.values()] == [[], [], []]
    assert [cell["start"] for cell in cells.values()] == ["cold", "cold", None]
    _, whole, cached = cells.values()
    assert cached["config"]["store"] == "/the/users/store"
    assert whole["config"]["store"] not in (None, "/the/users/store")
    assert "[2/3] compile=whole -> sweep/1-compile=whole" in output
    assert "[1/3] compile=eager: finished · 1.00 steps/s · " in output
    assert "(2 left)" in output, "what another strategy compiles is not known"
    assert "[2/3] compile=whole: finished · 2.00 steps/s · " in output
    table = [line.split()[:4] for line in output.splitlines()]
    assert ["eager", "1", "1,000", "1"] in table
    assert ["whole", "1", "500", "~2.00x"] in table
    assert output.splitlines()[-1] == "tensorboard --logdir sweep"


def test_failing_crashing_killed_and_refused_cells_leave_records_and_do_not_end_the_sweep(
    start_trainer: Any, tmp_path: Path
) -> None:
    process = start_trainer([*SWEEP, "seed=1,2,3,4,0"], cwd=tmp_path)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    cells = {name.partition("-")[2]: cell for name, cell in records(tmp_path / "sweep").items()}
    assert {name: (cell["status"], cell["reason"]) for name, cell in cells.items()} == {
        "seed=0": ("finished", None),
        "seed=1": ("failed", "RuntimeError: loss is not finite"),
        "seed=2": ("failed", "crashed (exit code 7)"),
        "seed=3": ("failed", "killed (SIGKILL), as a system does that runs out of memory"),
        "seed=4": ("failed", "refused: task.data.root='' must name a folder"),
    }
    assert all(cell["label"] == "eager" and cell["task"] == "captioning" for cell in cells.values())
    assert all(f"{name}" in cell["command"] for name, cell in cells.items())
    for name, cell in cells.items():
        assert cell["reason"] is None or re.search(rf"(?m)^\[\d/5\] {name}: .*{re.escape(cell['reason'])} \(", output)
    assert "killed (SIGKILL)" in output
    assert "Traceback" not in errors + output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_running_cell_end_and_starts_no_other(
    start_trainer: Any, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_trainer([*SWEEP, "seed=5,0", "trainer.max_steps=1,2"], cwd=tmp_path)
    wait_for(tmp_path / "sweep" / "0-seed=5,trainer.max_steps=1" / "waiting")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches every process of the terminal
    else:
        process.send_signal(number)  # a job manager's SIGTERM only the sweep's
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + number, errors
    assert records(tmp_path / "sweep")["0-seed=5,trainer.max_steps=1"]["reason"] == number.name
    assert "stopped after 1 of 4 cells" in output
    assert output.splitlines()[-1] == ("continue with: python -m trainer -m seed=5,0 trainer.max_steps=1,2 sweep=sweep")
    assert "Traceback" not in errors


def test_cold_starts_on_empty_caches_and_warm_on_those_of_its_twin(start_trainer: Any, tmp_path: Path) -> None:
    process = start_trainer([*SWEEP, "repeat=warm,cold"], cwd=tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    cold, warm = records(tmp_path / "sweep").values()
    assert (cold["start"], cold["config"]["found"]) == ("cold", [])
    assert (warm["start"], warm["config"]["found"]) == ("warm", [str(cold["config"]["pid"])])
    assert not list((tmp_path / "sweep" / "caches").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a process of its parent's death on Linux only")
def test_a_killed_sweep_continues_with_the_cell_that_was_running_from_its_beginning(
    start_trainer: Any, tmp_path: Path
) -> None:
    process = start_trainer([*SWEEP, "seed=5"], cwd=tmp_path)
    cell = tmp_path / "sweep" / "0-seed=5"
    wait_for(cell / "waiting")
    process.kill()
    wait_for(cell / "record.json")  # of the cell, told by the kernel
    assert records(tmp_path / "sweep")["0-seed=5"]["status"] == "interrupted"
    process.communicate(timeout=200)
    process = start_trainer([*SWEEP, "seed=5"], cwd=tmp_path)
    wait_for(tmp_path / "sweep-set-aside" / "0-seed=5" / "waiting")
    wait_for(cell / "waiting")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert records(tmp_path / "sweep")["0-seed=5"]["resumed_from"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compile=eager,hole"], "compile=hole is not an option; near: whole"),
        (["repeat=warm", "seed=7,8"], "repeat='warm' of seed=7 has no cold cell in this sweep; use repeat=cold,warm"),
        (["hydra.launcher.rounds=0"], "error: hydra.launcher.rounds=0 must be at least 1"),
        (["hydra.launcher.caches=warm"], "error: hydra.launcher.caches='warm' is not one of ('own', 'shared')"),
        (["hydra.launcher.rounds=few"], "error: hydra.launcher: Value 'few' of type 'str' could not be converted"),
        (["hydra.launcher.arms=[eager]", "compile=whole"], "hydra.launcher.arms and compile=whole both name"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_run_stops_the_sweep_before_the_first_cell(
    command_line: Any, called: Any, capfd: Any, tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert command_line(*SWEEP, *arguments) == 2
    assert said in capfd.readouterr().err
    assert not records(tmp_path / "sweep")


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_single_run_has_no_caches_of_its_own(command_line: Any, called: Any, capfd: Any, start: str) -> None:
    assert command_line(f"repeat={start}") == 2
    assert capfd.readouterr().err == (
        f"error: repeat='{start}': a sweep gives its cells caches of their own, use -m repeat=cold,warm\n"
    )
    assert called == []
