"""Two processes of one DDP group on the CPU, and what each of them has to say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT


def said_by_two(script: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``script`` twice, given ``folder`` and ``LOCAL_RANK``; returns what it wrote into ``folder/<rank>.json``."""
    (folder / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = []
    for rank in range(2):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(folder / "script.py"), str(folder)]
        group.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=200)[1] for process in group]
    finally:
        for process in group:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), said[0][-3000:]
    return [json.loads(file.read_text()) for file in files]
