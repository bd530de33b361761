"""What a run begins with: what a sweep passes to its cell, compile caches, the code's version, the first record.

``repeat=cold`` and ``repeat=warm`` are about directories in variables that must be set before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.process import detect_launch
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
ROOT = Path(__file__).resolve().parents[1]


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
