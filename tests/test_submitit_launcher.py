"""Jobs of a cluster, tried with submitit's executor for this machine: the same cells, twins and records as anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.sweep.ledger import Entry, Ledger
from trainer.sweep.plan import SubmititOptions
from trainer.sweep.processes import CellEnd
from trainer.sweep.slurm import Queue
from trainer.telemetry.record import RunRecord

submitit = pytest.importorskip("submitit")


def test_cells_are_jobs_and_twins_one_job(start_trainer: Any, tmp_path: Path) -> None:
    command = ["-m", "hydra.sweep.dir=sweep", "hydra/launcher=submitit_local", "seed=0,2", "repeat=cold,warm"]
    process = start_trainer(command, cwd=tmp_path)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 1, errors
    records = {file.parent.name: json.loads(file.read_text()) for file in (tmp_path / "sweep").glob("*/record.json")}
    cold, warm = records["0-seed=0,repeat=cold"], records["1-seed=0,repeat=warm"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert warm["config"]["found"] == [str(cold["config"]["pid"])]
    assert records["2-seed=2,repeat=cold"]["reason"] == "crashed (exit code 7)"
    assert records["3-seed=2,repeat=warm"]["reason"] == "not run: its cold cell failed"
    assert len(list((tmp_path / "sweep" / "submitit").glob("*_submitted.pkl"))) == 2
    assert "2.00 steps/s" not in output
    assert "[2/4] seed=0 repeat=warm: finished · 1.00 steps/s · " in output


def test_only_what_is_set_is_told_to_submitit() -> None:
    options = SubmititOptions(slurm_partition="gpu", gpus_per_node=2, rounds=3)
    assert options.parameters() == {
        "timeout_min": 60,
        "gpus_per_node": 2,
        "tasks_per_node": 1,
        "nodes": 1,
        "stderr_to_stdout": True,
        "slurm_partition": "gpu",
        "slurm_signal_delay_s": 120,
    }
    with pytest.raises(ValueError, match=r"nodes and tasks_per_node must be 1"):
        SubmititOptions(nodes=2)


def test_slurm_without_its_commands_is_refused_in_one_line(
    command_line: Any, called: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("-m", "hydra/launcher=submitit_slurm", "seed=0,1") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: hydra/launcher=submitit_slurm: ")


class Stopping:
    """A process that ends as interrupted once it is sent a signal."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, number: int) -> None:
        self.sent.append(number)

    def poll(self) -> CellEnd | None:
        record = RunRecord(task="toy", status="interrupted")
        return CellEnd(exit_code=143, record=record, seconds=1.0) if self.sent else None


def test_a_preempted_job_lets_its_cell_write_a_checkpoint_and_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.sweep.slurm as submitted

    monkeypatch.setattr(submitted.dataclasses, "replace", lambda process: process)
    done = CellEnd(exit_code=0, record=RunRecord(task="toy", status="finished"), seconds=1.0)
    processes: list[Any] = [Stopping(), Stopping()]
    again = Queue(processes, [done]).checkpoint()
    assert (processes[0].sent, processes[1].sent) == ([], [15])
    assert again.function.ends == [done]
    assert again.function.processes == processes


def test_a_sweep_whose_jobs_are_not_over_is_not_gone_on_with(
    command_line: Any, called: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from submitit.local.local import LocalJob

    entry = Entry(number=0, overrides=["seed=0"], directory="0-seed=0", state="running", job_id="17")
    Ledger(
        directory=tmp_path / "sweep",
        arguments=["-m", "hydra/launcher=submitit_local", "seed=0"],
        working_directory=str(tmp_path),
        entries={entry.key: entry},
    ).save()
    monkeypatch.setattr(LocalJob, "done", lambda self, force_check=False: False)
    assert command_line("-m", "sweep=sweep") == 2
    assert capfd.readouterr().err == "error: sweep: jobs 17 of this sweep are not over: wait, or cancel them\n"
