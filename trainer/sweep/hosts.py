"""Processes that torchrun or SLURM has started, on one host or on several: what their environment says, and what of the
settings follows it. No torch, no process: functions of an environment.

Lightning's ``TorchElasticEnvironment`` and ``SLURMEnvironment`` read the same variables once the training begins.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

BY_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""
BY_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_ID")
"""What srun sets (https://slurm.schedmd.com/srun.html); ``SLURM_NTASKS_PER_NODE`` where it was asked for."""
OWN_SHELL = ("bash", "interactive")
"""Names of jobs in which somebody types commands; Lightning takes them for no SLURM either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What started this process together with others; the user's own command line did not."""

    by: str
    """``torchrun``, ``SLURM``, or ``RANK`` where another launcher has set torchrun's variables."""
    rank: int
    """Among all processes; 0 prints and writes."""
    local_rank: int
    processes: int
    """On all hosts."""
    per_host: int
    hosts: int
    job: str | None = None
    """SLURM's number of the job and of its step, the same when the job is put into the queue again."""

    @property
    def name(self) -> str:
        return self.by if self.job is None else f"{self.by} {self.job}"

    @property
    def place(self) -> str:
        """Which process this is, for people."""
        return f"rank {self.rank} on {socket.gethostname()}"


def launched(environ: Mapping[str, str]) -> Launch | None:
    """What started this process, by its environment; None where it was started alone.

    Raises ValueError where the environment says so by halves: the process would wait for others that are not there, or
    train alone beside them.
    """
    if "RANK" in environ:
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK"
        found = _numbers(environ, BY_RANK, f"RANK={environ['RANK']} is set", "start every process by torchrun")
        rank, local_rank, processes, per_host = found[:4]
        hosts, job, several = processes // max(per_host, 1), None, ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif environ.get("SLURM_NTASKS", "1") != "1" and environ.get("SLURM_JOB_NAME") not in OWN_SHELL:
        tasks = f"SLURM_NTASKS={environ['SLURM_NTASKS']} is set"
        if "SLURM_STEP_ID" not in environ:
            raise ValueError(f"{tasks} and SLURM_STEP_ID is not: put srun before the command, or ask for one task")
        found = _numbers(environ, BY_SRUN, tasks, "give sbatch --nodes and --ntasks-per-node, and start by srun")
        rank, local_rank, processes, per_host, hosts = found[:5]
        by, job, several = "SLURM", f"{found[5]}.{environ['SLURM_STEP_ID']}", ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    else:
        return None
    if per_host * hosts != processes or not rank < processes:
        raise ValueError(
            f"{several[0]}={processes} is not a multiple of {several[1]}={per_host}, or too few for rank {rank}: every "
            "host has to start as many processes"
        )
    return Launch(by=by, rank=rank, local_rank=local_rank, processes=processes, per_host=per_host, hosts=hosts, job=job)


def speaking(environ: Mapping[str, str], *, alike: bool) -> str | None:
    """What to print before each line of an error in this process: which it is, if not rank 0. None for nothing at all:
    what all processes of a host find ``alike``, one of them says."""
    try:
        launch = launched(environ)
    except ValueError:  # the error itself, perhaps
        launch = None
    if launch is None or launch.rank == 0:
        return ""
    return None if alike and launch.local_rank > 0 else f"{launch.place}: "


def followed(
    launch: Launch | None, devices: int | str | None, num_nodes: int | None
) -> tuple[int | str | None, int | None]:
    """``trainer.devices`` and ``trainer.num_nodes`` as ``launch`` has them where they are None.

    Raises ValueError for values of the user's that differ from what was started.
    """
    if launch is None:
        if num_nodes not in (None, 1):
            raise ValueError(
                f"trainer.num_nodes={num_nodes}: nothing has started processes on other hosts; start the command by "
                f"torchrun --nnodes={num_nodes} on each of them, or by srun"
            )
        return devices, num_nodes
    hosts, each = (
        ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE") if launch.job else ("the number of hosts", "LOCAL_WORLD_SIZE")
    )
    asked = len(devices.split(",")) if isinstance(devices, str) and "," in devices else devices
    if asked not in (None, "auto", -1, "-1", launch.per_host, str(launch.per_host)):
        raise ValueError(
            f"trainer.devices={devices}, and {launch.by} has started {each}={launch.per_host} processes on each host: "
            "leave trainer.devices out, or start as many"
        )
    if num_nodes not in (None, launch.hosts):
        raise ValueError(
            f"trainer.num_nodes={num_nodes}, and {launch.by} has started processes on {hosts}={launch.hosts}: leave "
            "trainer.num_nodes out, or start them on as many"
        )
    return (devices if asked is not devices else launch.per_host), launch.hosts


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], found: str, advice: str) -> list[int]:
    """The values of ``names``; an address counts as 0."""
    if missing := [name for name in names if name not in environ]:
        raise ValueError(f"{found} and {', '.join(missing)} not: {advice}, or unset {found.partition('=')[0]}")
    numbers = []
    for name in names:
        try:
            numbers.append(0 if name == "MASTER_ADDR" else int(environ[name]))
        except ValueError:
            raise ValueError(f"{name}={environ[name]!r} is not a number: {advice}") from None
    return numbers
