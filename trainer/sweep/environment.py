"""Environment of a cell: what a sweep passes to its process, its compile caches, and the version of the code.

``repeat=cold`` and ``repeat=warm`` are about directories in environment variables, which must be set before torch is
imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.sweep.hosts import launched
from trainer.telemetry.machine import processor_name
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from strategies import Strategy
    from trainer.settings import Config

CELL_VARIABLE = "CRUCIBLE_CELL"
"""Holds a ``CellEnvironment`` as JSON in the process of a cell."""
CACHES_DIRECTORY = "caches"
"""Below a run's or a sweep's directory."""
ROOT = Path(__file__).resolve().parents[2]
CODE_PACKAGES = ("crucible-train", "torch", "lightning")
"""Packages whose version decides what a cell measures."""
PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>: the signal that a process gets when its parent dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnvironment:
    """What a sweep passes to the process of a cell."""

    parent: int
    """Process that started it."""
    round: int | None = None
    start: str | None = None
    """``cold`` or ``warm``: what the caches are that it got; None when they were left as they are."""

    def variables(self) -> dict[str, str]:
        """Environment variables of the cell's process."""
        return {CELL_VARIABLE: json.dumps(dataclasses.asdict(self))}


def current() -> CellEnvironment | None:
    """What the sweep passed to this process; None when it is not a cell, or not the cell's first process."""
    text = os.environ.get(CELL_VARIABLE)
    return None if text is None else CellEnvironment(**json.loads(text))


def end_with_parent() -> None:
    """Ask the kernel (Linux) for a SIGTERM when the sweep dies, even by SIGKILL: the cell then stops with a checkpoint.

    A cell that went on alone would write into a directory that a resumed sweep has given to another process.
    """
    cell = current()
    if cell is not None and cell.parent == os.getppid():
        signal_at_end_of_parent(signal.SIGTERM)


def signal_at_end_of_parent(signum: int) -> None:
    """Ask the kernel (Linux) for ``signum`` when this process's parent dies; 0 for nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def cache_variables(caches: Path, *, store: bool = True) -> dict[str, str]:
    """Environment variables that make ``caches`` the place of all compile caches, and of ``compile=cached``'s store."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **({"CRUCIBLE_CACHE_URL": str(caches / "artifacts")} if store else {}),
    }


@contextlib.contextmanager
def starting_caches(repeat: str | None, run_dir: Path) -> Iterator[None]:
    """Give this process, when it is not a cell of a sweep, the caches that ``repeat`` asks for; torch must not be
    imported yet. Raises ValueError for ``warm``, which takes another process before it."""
    cell = current()
    if repeat is None or (cell is not None and cell.start == repeat):
        yield
        return
    if repeat == "warm":
        raise ValueError(
            "repeat='warm' starts on the caches that a cold run of the same command has filled: use -m repeat=cold,warm"
        )
    caches = (run_dir / CACHES_DIRECTORY).resolve()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if (launch := launched(os.environ)) is not None:  # the run's folder is not known yet, and perhaps another host's
        caches = Path(tempfile.gettempdir()) / f"crucible-{CACHES_DIRECTORY}-{os.getppid()}"
        first = launch.local_rank == 0
    if first:
        shutil.rmtree(caches, ignore_errors=True)
    os.environ.update(cache_variables(caches))
    try:
        yield
    finally:
        if first:
            shutil.rmtree(caches, ignore_errors=True)


def git_commit(root: Path = ROOT) -> str | None:
    """Commit of the checkout that ``root`` is in, with ``+dirty`` when files differed; None outside a checkout."""
    if root == ROOT and not (ROOT / ".git").exists():  # installed, perhaps into a folder of somebody's checkout
        return None
    try:
        commit = _git("rev-parse", "HEAD", root=root).strip()
        return commit + ("+dirty" if _git("status", "--porcelain", "--untracked-files=no", root=root).strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def code_version() -> str:
    """Versions of the packages, the commit, and a hash of what differs from it in tracked files, in one line."""
    found = []
    for package in CODE_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    if (commit := git_commit()) is not None:
        found.append(f"commit {commit[:10]}")
        if commit.endswith("+dirty"):
            found.append(f"changes {hashlib.sha256(_git('diff', 'HEAD').encode()).hexdigest()[:12]}")
    return ", ".join(found)


def _git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", check=True, timeout=30
    ).stdout


def described(config: Config, command: list[str]) -> RunRecord:
    """A run's record as far as its configuration tells it, before anything is built: what runs, of which code, from
    which caches and in which round of a sweep."""
    from strategies.compose import ordered
    from strategies.credentials import without_credentials
    from trainer.settings import PEER, Peer

    cell = current()
    record = RunRecord(
        task=config.task.title,
        run=config.run.name,
        config=without_credentials(dataclasses.asdict(config)),
        seed=config.seed,
        start=config.repeat,
        round=None if cell is None else cell.round,
        **origin(ordered(config.compile.values()), command),
    )
    if isinstance(config.run, Peer):  # an arm of the same workload as our training
        record.run, record.config["run"] = "train", {}
        record.strategies, record.label = [{"name": PEER, "arm": config.run.peer}], f"{PEER} {config.run.peer}"
    return record


def origin(strategies: Sequence[Strategy], command: Sequence[str], root: Path = ROOT) -> dict[str, Any]:
    """Fields of a record that say where a run comes from: ``strategies`` in order, ``command``, now, this machine and
    the checkout that ``root`` is in."""
    # Not above: the command line reads its environment first, and then makes sure that this package is ours.
    from strategies.compose import label
    from strategies.credentials import without_credentials

    launch = None
    with contextlib.suppress(ValueError):  # in a script of one's own it is nothing that we refuse
        launch = launched(os.environ)
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
