"""Two of torchrun's agents on this machine, as if on two hosts: they train as one run, and when a process is killed
the run is started again and continues from its last checkpoint, in the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import free_port
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 280
COMMAND = (
    "experiment=micro_transformer_block_smoke",
    "compile=regional",
    "compile.regional.backend=eager",
    "trainer.strategy=ddp",
    "trainer.accelerator=cpu",
    "trainer.max_steps=20",
    "trainer.val_every_n_steps=0",
    "trainer.checkpoint_every_n_steps=5",
)


PLUGIN = """
import os, signal
from pathlib import Path
from tasks.micro.task import Micro

build, killed = Micro.build_module, Path(__file__).with_name("killed")

def build_module(*arguments, **options):
    module = build(*arguments, **options)
    step = module.training_step
    def training_step(*batch):
        if (os.environ["RANK"], module.global_step) == ("1", 8) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*batch)
    module.training_step = training_step
    return module

Micro.build_module = build_module
"""
"""Kills one process, once, after a checkpoint."""


def test_two_hosts_train_as_one_and_go_on_after_a_process_was_killed(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "plugin.py").write_text(PLUGIN)
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
                    [*agent, *meet, "-m", "trainer", "--config-dir", str(tmp_path), *COMMAND],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
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
    assert "restarted by torchrun: from step 5" in said[first]
    assert "verdict:" in said[first]
    assert "verdict:" not in said[1 - first]
    assert len(list(tmp_path.glob("[01]/outputs/*/*/*"))) == 1  # no folder of another clock, none of the second start
