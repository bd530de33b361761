"""Signals as schedulers send them: to the whole process group, or to a run whose reader has left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.trainer.runs import last_checkpoint
from tests.trainer.test_interruption import Start, started
from trainer.telemetry.record import RunRecord


def test_a_sigterm_to_the_group_is_an_interruption_that_can_be_gone_on_from(
    start_trainer: Start, tmp_path: Path
) -> None:
    process, run_dir = started(start_trainer, tmp_path, "task.data.num_workers=1")
    os.killpg(process.pid, signal.SIGTERM)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 143, errors
    # Torch raises wherever Python is when a worker has ended, within a call of the garbage collector's, too.
    assert "Traceback" not in re.sub(r"Exception ignored in: .*\nTraceback", "", errors)
    record = RunRecord.load(run_dir)
    assert (record.status, record.signal) == ("interrupted", signal.SIGTERM)
    # By SIGTERM torch's data workers end at once, and the run with them: then the last regular checkpoint counts.
    assert record.steps is not None
    assert record.steps >= last_checkpoint(run_dir)["global_step"]
    assert "continue with: " in said


def test_a_reader_that_leaves_does_not_take_the_run_with_it(start_trainer: Start, tmp_path: Path) -> None:
    process, run_dir = started(start_trainer, tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    record = RunRecord.load(run_dir)
    assert record.status == "interrupted"
    assert record.steps == last_checkpoint(run_dir)["global_step"]


ALONE = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from tasks.captioning.model import Captioner
from tests.trainer.runs import train

folder, rank = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", 0))
torch.set_num_threads(1)

def on_train_batch_start(module, batch, batch_idx):
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    while rank == 0 and not (folder / "1.pid").exists():
        time.sleep(0.05)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)

Captioner.on_train_batch_start = on_train_batch_start
record = train(folder / "run", "trainer.devices=2", "trainer.max_steps=4")
(folder / f"{rank}.json").write_text(json.dumps([record.status, record.signal, record.steps]))
sys.exit(record.exit_code)
"""


def test_a_process_that_stops_in_its_first_step_takes_those_with_it_that_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALONE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 143, ended.stderr[-3000:]
    assert json.loads((tmp_path / "0.json").read_text()) == ["interrupted", signal.SIGTERM, 0]
    assert RunRecord.load(tmp_path / "run").status == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "1.pid").read_text()), 0)
