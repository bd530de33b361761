"""Orphans: processes of cells that have outlived the sweep which started them, by the seconds of a last checkpoint."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from trainer.sweep.cell_environment import VARIABLE
from trainer.sweep.ledger import Entry

POLL_SECONDS = 0.2


def host() -> str:
    """Name of this machine, by which processes of a shared directory are told apart."""
    return socket.gethostname()


def wait_for(entry: Entry, say: Callable[[str], None]) -> None:
    """Wait until no process of this machine runs the cell any more; ``say`` that it waits, and for which."""
    if entry.pid is None or entry.host != host() or not _is_cell(entry.pid):
        return
    say(f"waiting for process {entry.pid}, which still runs cell {entry.number} of this sweep")
    while _is_cell(entry.pid):
        time.sleep(POLL_SECONDS)


def _is_cell(pid: int) -> bool:
    """Whether a process is a cell of a sweep, and not another one that got its number."""
    if Path("/proc/self/environ").exists():
        try:
            return f"{VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or somebody else's
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
