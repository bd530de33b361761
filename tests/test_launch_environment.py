"""Processes that torchrun or SLURM has started: the settings follow their environment, what does not fit is refused in
one line before any work, and all of them name one folder."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from trainer.process import detect_launch, devices_of_launch, present_handlers, rank_prefix

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "3",
}


def without(environ: dict[str, str], name: str, **more: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name} | more


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *SLURM, "SLURM_RESTART_COUNT"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "by", "shape"),
    [
        (TORCHRUN | {"RANK": "3", "LOCAL_RANK": "1"}, "torchrun", (3, 1, 4, 2, 2)),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "RANK", (0, 0, 4, 2, 2)),
        (SLURM | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, "SLURM 71.0", (5, 1, 6, 2, 3)),
        (SLURM | TORCHRUN, "torchrun", (0, 0, 4, 2, 2)),  # srun torchrun ...
    ],
)
def test_the_environment_says_who_started_how_many(
    environ: dict[str, str], by: str, shape: tuple[int, int, int, int, int]
) -> None:
    launch = detect_launch(environ)
    assert launch.name == by
    assert (launch.rank, launch.local_rank, launch.processes, launch.per_host, launch.hosts) == shape
    assert devices_of_launch(launch, None, None) == shape[3:]
    assert devices_of_launch(launch, "auto", launch.hosts) == shape[3:]
    assert devices_of_launch(launch, "0,1", None) == ("0,1", launch.hosts)


def test_one_host_is_no_other_configuration_under_torchrun() -> None:
    launch = detect_launch(TORCHRUN | {"WORLD_SIZE": "2"})
    assert devices_of_launch(launch, 2, None) == (2, None)
    assert devices_of_launch(launch, 2, 1) == (2, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"},  # Lightning's own launcher
        {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "1"},  # a batch script, or a cell of a sweep
        SLURM | {"SLURM_JOB_NAME": "interactive"},
    ],
)
def test_one_process_is_started_alone(environ: dict[str, str]) -> None:
    assert detect_launch(environ) is None
    assert devices_of_launch(None, 2, None) == (2, None)
    assert devices_of_launch(None, None, 1) == (None, 1)


REFUSED: list[tuple[dict[str, str], list[str], tuple[str, ...]]] = [
    (without(TORCHRUN, "WORLD_SIZE"), [], ("RANK=0 is set", "WORLD_SIZE")),
    (TORCHRUN | {"WORLD_SIZE": "many"}, [], ("WORLD_SIZE='many' is not a number",)),
    (TORCHRUN | {"WORLD_SIZE": "3"}, [], ("WORLD_SIZE=3", "LOCAL_WORLD_SIZE=2")),
    (TORCHRUN, ["trainer.devices=4"], ("trainer.devices=4", "torchrun has started 2 processes on each of 2 hosts")),
    (TORCHRUN, ["trainer.devices='0,1,2'"], ("trainer.devices=0,1,2", "2 processes on each")),
    (TORCHRUN, ["trainer.num_nodes=1"], ("trainer.num_nodes=1", "torchrun", "2 hosts")),
    (TORCHRUN, ["-m", "seed=0,1"], ("-m: each of the 4 processes", "torchrun")),
    (SLURM, ["trainer.num_nodes=2"], ("trainer.num_nodes=2", "SLURM", "3 hosts")),
    (SLURM, ["trainer.devices=4"], ("trainer.devices=4", "SLURM", "2 processes on each")),
    (without(SLURM, "SLURM_NTASKS_PER_NODE"), [], ("SLURM_NTASKS=6 is set", "--ntasks-per-node")),
    (without(SLURM, "SLURM_STEP_ID"), [], ("SLURM_NTASKS=6 is set", "put srun before the command")),
    ({}, ["trainer.num_nodes=2"], ("trainer.num_nodes=2", "torchrun --nnodes=2", "srun")),
    ({}, ["trainer.num_nodes=0"], ("trainer.num_nodes=0",)),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "arguments", "says"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_before_any_work(
    command_line: Any,
    called: list[Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    arguments: list[str],
    says: tuple[str, ...],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert command_line(*arguments) == 2
    printed = capfd.readouterr().err
    (_line,) = [line for line in printed.splitlines() if all(part in line for part in says)]
    assert "Traceback" not in printed
    assert called == []
    assert list(tmp_path.rglob("*")) == []


def test_of_what_all_processes_find_alike_one_of_a_host_says_it() -> None:
    second = TORCHRUN | {"RANK": "2"}
    assert rank_prefix(TORCHRUN, alike=True) == ""
    assert rank_prefix(second, alike=True) == f"rank 2 on {socket.gethostname()}: "
    assert rank_prefix(second | {"RANK": "3", "LOCAL_RANK": "1"}, alike=True) is None
    assert rank_prefix(second | {"RANK": "3", "LOCAL_RANK": "1"}, alike=False) == f"rank 3 on {socket.gethostname()}: "
    assert rank_prefix(without(second, "WORLD_SIZE"), alike=True) == ""


def test_the_processes_of_a_job_name_one_folder_and_only_the_first_makes_it(
    command_line: Any, called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for rank in ("1", "0", "0"):  # the last one once more, as when the job was put into the queue again
        monkeypatch.setenv("SLURM_PROCID", rank)
        assert command_line("hydra.run.dir=runs/${now:%S-%f}") == 0
        assert (tmp_path / "runs").exists() == (rank == "0")
    assert {call["run_dir"] for call in called} == {tmp_path / "runs" / "slurm-71.0"}
    assert all((call["config"].trainer.devices, call["config"].trainer.num_nodes) == (2, 3) for call in called)


def test_lightning_takes_the_same_for_the_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.build import cluster

    def kind() -> str | None:
        found = cluster()
        return type(found[0]).__name__ if found else None

    assert kind() is None
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert kind() == "LightningEnvironment"
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert kind() == "SLURMEnvironment"
    assert not cluster()[0].auto_requeue  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "0")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert kind() == "TorchElasticEnvironment"


def test_a_job_of_slurms_hears_the_signal_before_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGUSR1 not in present_handlers()
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    assert present_handlers()[signal.SIGUSR1] == signal.SIG_DFL
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert signal.SIGUSR1 not in present_handlers()  # somebody's own
    finally:
        signal.signal(signal.SIGUSR1, before)
