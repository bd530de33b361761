"""Two of torchrun's agents on this machine, as if on two hosts: they train as one run, and when a process is killed
the run is started again and continues from its last checkpoint, in the same folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 280
COMMAND = (
    "experiment=micro_transformer_block_smoke",
    "compile=regional",
    "compile.regional.backend=eager",
    "trainer.strategy=ddp",
    "trainer.accelerator=cpu",
    "trainer.max_steps=60",
    "trainer.val_every_n_steps=0",
    "trainer.checkpoint_every_n_steps=5",
)


def worker(folder: Path, rank: int) -> int | None:
    """The process of ``rank`` below ``folder``."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cwd").readlink().is_relative_to(folder):
                continue
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables:
            return int(process.name)
    return None


def test_two_hosts_train_as_one_and_go_on_after_a_process_was_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = []
    for host in (0, 1):
        folder = tmp_path / str(host)
        folder.mkdir()
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
        meet = ["--local-addr=127.0.0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
        with (tmp_path / f"{host}.log").open("w") as log:
            agents.append(
                subprocess.Popen(
                    [*agent, *meet, "-m", "trainer", *COMMAND],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not list(tmp_path.glob("[01]/outputs/*/*/*/checkpoints/last.ckpt")):
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.1)
        victim = worker(tmp_path, 1)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        codes = [agent.wait(max(1.0, deadline - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)
                agent.wait(60)
    said = [(tmp_path / f"{host}.log").read_text() for host in (0, 1)]
    assert codes == [0, 0], "\n".join(said)
    (file,) = tmp_path.rglob("record.json")
    record = RunRecord.load(file.parent)
    assert (record.status, record.world_size, record.num_nodes, record.restarts) == ("finished", 2, 2, 1)
    assert record.launched_by == "torchrun"
    assert record.resumed_from == str(file.parent / "checkpoints" / "last.ckpt")
    assert record.ended_in_eager is False
    first = int(file.is_relative_to(tmp_path / "1"))  # which of them is rank 0, the agents draw
    assert "restarted by torchrun: from step" in said[first]
    assert "verdict:" in said[first]
    assert "verdict:" not in said[1 - first]
    assert len(list(tmp_path.glob("[01]/outputs/*/*/*"))) == 1  # no folder of another clock, none of the second start
