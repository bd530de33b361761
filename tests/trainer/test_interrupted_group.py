"""Signals as schedulers send them: to the whole process group, or to a run whose reader has left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
    assert "Traceback" not in errors
    record = RunRecord.load(run_dir)
    assert (record.status, record.signal) == ("interrupted", signal.SIGTERM)
    # By SIGTERM torch's data workers end at once, and the run with them: then the last regular checkpoint counts.
    assert record.steps is not None
    assert record.steps >= last_checkpoint(run_dir)["global_step"]
    assert "go on with: " in said


def test_a_reader_that_leaves_does_not_take_the_run_with_it(start_trainer: Start, tmp_path: Path) -> None:
    process, run_dir = started(start_trainer, tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    record = RunRecord.load(run_dir)
    assert record.status == "interrupted"
    assert record.steps == last_checkpoint(run_dir)["global_step"]
