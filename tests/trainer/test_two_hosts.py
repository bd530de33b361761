"""Two of torchrun's agents on this machine, as if on two hosts: they train as one run, and when a process is killed
the run is started again and continues from its last checkpoint, in the same folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.processes import Pair, command_on_a_rank, free_port
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")

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


def host(folder: Path, port: int) -> None:
    """An agent of torchrun's, whose processes are forks of it: it has imported all that they need."""
    there = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "local_addr": "127.0.0.1", "run_id": "test"}
    config = LaunchConfig(2, 2, 1, **there, max_restarts=2, start_method="fork")  # type: ignore[arg-type]
    elastic_launch(config, of_a_host)(folder, os.environ["RANK"])


def of_a_host(folder: Path, number: str) -> None:
    rank_zero_only.rank = int(os.environ["RANK"])  # which of them is rank 0, the agents draw
    own = folder / number
    own.mkdir(exist_ok=True)
    assert command_on_a_rank(["--config-dir", str(folder), *COMMAND], own, folder / f"{number}.log") == 0


def test_two_hosts_train_as_one_and_go_on_after_a_process_was_killed(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    pair(host, tmp_path, free_port())
    said = [(tmp_path / f"{number}.log").read_text() for number in (0, 1)]
    (file,) = tmp_path.rglob("record.json")
    record = RunRecord.load(file.parent)
    assert (record.status, record.world_size, record.num_nodes, record.restarts) == ("finished", 2, 2, 1)
    assert record.launched_by == "torchrun"
    assert record.resumed_from == str(file.parent / "checkpoints" / "last.ckpt")
    assert record.ended_in_eager is False
    first = int(file.is_relative_to(tmp_path / "1"))
    assert "restarted by torchrun: from step 5, its last checkpoint" in record.notes
    assert "verdict:" in said[first]
    assert "verdict:" not in said[1 - first]
    assert len(list(tmp_path.glob("[01]/outputs/*/*/*"))) == 1  # no folder of another clock, none of the second start
