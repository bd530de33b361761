"""Signals as terminals and schedulers send them: to the whole process group, or to a run whose reader has left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.trainer.runs import last_checkpoint
from tests.trainer.test_interruption import Start, started
from trainer.telemetry.record import RunRecord


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_is_an_interruption_that_can_be_gone_on_from(
    start_trainer: Start, tmp_path: Path, signum: signal.Signals
) -> None:
    process, run_dir = started(start_trainer, tmp_path, "task.data.num_workers=1")
    assert os.getpgid(process.pid) == process.pid, "the run must not share the tests' own group"
    os.killpg(process.pid, signum)
    said, errors = process.communicate(timeout=90)
    assert process.returncode == 128 + signum, errors
    assert "Traceback" not in errors
    record = RunRecord.load(run_dir)
    assert (record.status, record.signal) == ("interrupted", signum)
    saved = last_checkpoint(run_dir)["global_step"]
    # By SIGTERM torch's data workers end at once, and the run with them: then the last regular checkpoint counts.
    assert record.steps == saved if signum == signal.SIGINT else record.steps >= saved
    assert "go on with: " in said


def test_a_reader_that_leaves_does_not_take_the_run_with_it(start_trainer: Start, tmp_path: Path) -> None:
    process, run_dir = started(start_trainer, tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=90) == 130
    record = RunRecord.load(run_dir)
    assert record.status == "interrupted"
    assert record.steps == last_checkpoint(run_dir)["global_step"]
