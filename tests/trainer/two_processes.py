"""Two processes of one DDP group on the CPU, and what each of them has to say."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

# Both processes are forks of one that has imported torch, which takes longer than what they do. Lightning asks for the
# rank when it is imported, so each imports it by itself.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.utils.tensorboard", "torchmetrics"])


def said_by_two(script: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``script`` twice, given ``folder`` and ``LOCAL_RANK``; returns what it wrote into ``folder/<rank>.json``."""
    (folder / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    group = [
        FORKS.Process(target=run_script, args=(folder, {**environment, "LOCAL_RANK": str(rank)})) for rank in range(2)
    ]
    try:
        for process in group:
            process.start()
        for process in group:
            process.join(timeout=200)
    finally:
        for process in group:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), (folder / "0.errors").read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def run_script(folder: Path, environment: dict[str, str]) -> None:
    """Be ``python folder/script.py folder`` in ``environment``."""
    os.environ.clear()
    os.environ.update(environment)
    with (folder / f"{environment['LOCAL_RANK']}.errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    script = str(folder / "script.py")
    sys.argv = [script, str(folder)]
    sys.path[:0] = [str(folder), str(ROOT)]
    runpy.run_path(script, run_name="__main__")
