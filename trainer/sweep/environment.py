"""Environment of a process: what a sweep passes to its cell, compile caches, the code's version, who started it.

``repeat=cold`` and ``repeat=warm`` are about directories in variables that must be set before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.process import PARENT
from trainer.telemetry.machine_monitor import processor_name
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from strategies import Strategy
    from trainer.settings import Config

SWEEP_VARIABLE, ROUND_VARIABLE = "CRUCIBLE_SWEEP", "CRUCIBLE_ROUND"
"""In the process of a cell: the number of the process that started it, and the round, if there are several."""
RECORDS_VARIABLE = "CRUCIBLE_RECORDS"
"""In the process of somebody's script: the folder that its records go to, whatever the script says."""
CACHES_DIRECTORY = "caches"
"""Below a run's or a sweep's directory."""
ROOT = Path(__file__).resolve().parents[2]


def cache_variables(caches: Path, *, store: bool = True) -> dict[str, str]:
    """Environment variables that make ``caches`` the place of all compile caches, and of ``compile=cached``'s store."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **({"CRUCIBLE_CACHE_URL": str(caches / "artifacts")} if store else {}),
    }


def git_commit(root: Path = ROOT) -> str | None:
    """Commit of the checkout that ``root`` is in, with ``+dirty`` when files differed; None outside a checkout."""
    if root != ROOT or (ROOT / ".git").exists():  # else installed, perhaps into a folder of somebody's checkout
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            changed = _git("status", "--porcelain", "--untracked-files=no", root=root).strip()
            return _git("rev-parse", "HEAD", root=root).strip() + "+dirty" * bool(changed)
    return None


def _git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", check=True, timeout=30
    ).stdout


def initial_record(config: Config, command: list[str]) -> RunRecord:
    """A run's record as far as its configuration tells it, before anything is built: what runs, of which code, from
    which caches and in which round of a sweep."""
    from strategies.base import ordered
    from strategies.compile_errors import without_credentials
    from trainer.settings import PEER, Peer

    number = os.environ.get(ROUND_VARIABLE)
    record = RunRecord(
        task=config.task.title,
        config=without_credentials(dataclasses.asdict(config)),
        seed=config.seed,
        start=config.repeat,
        round=int(number) if number else None,
        **origin(ordered(config.compile.values()), command),
    )
    if isinstance(config.run, Peer):  # an arm of the same workload as our training
        record.config["run"] = {}
        record.strategies, record.label = [{"name": PEER, "arm": config.run.peer}], f"{PEER} {config.run.peer}"
    return record


def origin(strategies: Sequence[Strategy], command: Sequence[str], root: Path = ROOT) -> dict[str, Any]:
    """Fields of a record that say what ran, when, on which machine, and of which checkout (the one of ``root``)."""
    # Not above: the command line reads its environment first, and then makes sure that this package is ours.
    from strategies.base import label
    from strategies.compile_errors import without_credentials

    launch = None
    with contextlib.suppress(ValueError):  # in a script of one's own it is nothing that we refuse
        launch = detect_launch(os.environ)
    return {
        "launched_by": None if launch is None else launch.name,
        "num_nodes": 1 if launch is None else launch.hosts,
        "strategies": without_credentials([strategy.facts() for strategy in strategies]),
        "label": label(strategies),
        "command": without_credentials(list(command)),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor_name(),
        "git_commit": git_commit(root),
    }


# ---- processes that torchrun or SLURM has started, on one host or on several: what their environment says, and what of
# the settings follows it. Lightning's ``TorchElasticEnvironment`` and ``SLURMEnvironment`` read the same variables.

BY_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
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
        return f"rank {self.rank} on {socket.gethostname()}"


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """What started this process, by its environment; None where it was started alone.

    Raises ValueError where it says so by halves: the process would wait for others in vain, or train alone beside them.
    """
    if "RANK" in environ:
        names, found, advice = BY_RANK, "RANK", "start every process by torchrun"
    elif environ.get("SLURM_NTASKS", "1") != "1" and environ.get("SLURM_JOB_NAME") not in OWN_SHELL:
        names, found = BY_SRUN, "SLURM_NTASKS"
        advice = "give sbatch --nodes and --ntasks-per-node, and start by srun"
        if "SLURM_STEP_ID" not in environ:
            tasks = f"SLURM_NTASKS={environ['SLURM_NTASKS']} is set"
            raise ValueError(f"{tasks} and SLURM_STEP_ID is not: put srun before the command, or ask for one task")
    else:
        return None
    if missing := [name for name in names if name not in environ]:
        what = f"{found}={environ[found]} is set and {', '.join(missing)} not"
        raise ValueError(f"{what}: {advice}, or unset {found}")
    if wrong := [name for name in names[:5] if not environ[name].isdecimal()]:
        raise ValueError(f"{wrong[0]}={environ[wrong[0]]!r} is not a number: {advice}")
    rank, local_rank, processes, per_host, hosts = (int(environ[name]) for name in names[:5])
    by, job = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK", None
    if names is BY_SRUN:
        by, job = "SLURM", f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    else:
        hosts = processes // max(per_host, 1)
    if per_host * hosts != processes or not rank < processes:
        raise ValueError(
            f"{names[2]}={processes} is not a multiple of {names[3]}={per_host}, or too few for rank {rank}: every "
            "host has to start as many processes"
        )
    return Launch(by=by, rank=rank, local_rank=local_rank, processes=processes, per_host=per_host, hosts=hosts, job=job)


def rank_prefix(environ: Mapping[str, str], *, alike: bool) -> str | None:
    """What to print before each line of an error in this process: which it is, if not rank 0. None for nothing at all:
    what all processes of a host find ``alike``, one of them says."""
    try:
        launch = detect_launch(environ)
    except ValueError:  # the error itself, perhaps
        launch = None
    if PARENT in environ:  # the first process of this host finds it, too, or says which one has ended
        return None
    if launch is None or launch.rank == 0:
        return ""
    return None if alike and launch.local_rank > 0 else f"{launch.place}: "


def devices_of_launch(
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
    asked = len(devices.split(",")) if isinstance(devices, str) and "," in devices else devices
    several = f"{launch.by} has started {launch.per_host} processes on each of {launch.hosts} hosts"
    if asked not in (None, "auto", -1, "-1", launch.per_host, str(launch.per_host)):
        raise ValueError(f"trainer.devices={devices}, and {several}: leave it out, or start as many")
    if num_nodes not in (None, launch.hosts):
        raise ValueError(f"trainer.num_nodes={num_nodes}, and {several}: leave it out, or start them on as many")
    return (devices if asked is not devices else launch.per_host), launch.hosts if launch.hosts > 1 else num_nodes
