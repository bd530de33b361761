"""Stand-in for ``trainer.run`` in fresh processes: Python imports this file at start when it is on PYTHONPATH.

What a run does is chosen by its seed, so that tests of the sweep need no torch and take no time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from trainer import run_start

FAILS, EXITS, KILLED, REFUSED, WAITS = 1, 2, 3, 4, 5
"""Seeds of runs that do not simply finish."""


def run(config: Any, *, run_dir: Path, command: list[str]) -> Any:
    """Do what the seed says, and leave a record as a real run would."""
    if config.seed == REFUSED:
        raise ValueError("task.data.root='' must name a folder")
    speed = 2.0 if config.compile else 1.0
    record = run_start.initial_record(config, command)
    record.status, record.final_loss, record.steady_steps_per_second = "finished", 0.25, speed
    record.warmup_seconds, record.warmup_steps, record.steps = 10.0 * speed, 5, config.trainer.max_steps
    record.resumed_from = config.resume
    record.config |= {"cwd": os.getcwd(), "pid": os.getpid(), "max_steps": config.trainer.max_steps}
    record.config |= {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "found": leave_in_caches()}
    record.config["store"] = os.environ.get("CRUCIBLE_CACHE_URL")
    if config.seed == FAILS:
        record.status, record.reason = "failed", "RuntimeError: loss is not finite"
    if config.seed == EXITS:
        os._exit(7)
    if config.seed == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.seed == WAITS and config.resume is None:
        wait_for_signal(record, run_dir)
    record.save(run_dir)
    return record


def leave_in_caches() -> list[str] | None:
    """What an earlier process left in Inductor's caches; leaves something there too. None where they are not set."""
    if (named := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is None:
        return None
    Path(named).mkdir(parents=True, exist_ok=True)
    found = sorted(os.listdir(named))
    (Path(named) / str(os.getpid())).touch()
    return found


def wait_for_signal(record: Any, run_dir: Path) -> None:
    """End as interrupted, with a checkpoint, once a signal comes, the way the real loop stops after its step."""

    def note(number: int, frame: object) -> None:
        record.status, record.signal, record.reason = "interrupted", number, signal.Signals(number).name

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    (run_dir / "waiting").touch()
    deadline = time.monotonic() + 200
    while record.status != "interrupted" and time.monotonic() < deadline:
        time.sleep(0.02)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "last.ckpt").touch()


run_start.git_commit = lambda *_: "0" * 40
module = types.ModuleType("trainer.run")
module.run = run  # type: ignore[attr-defined]
sys.modules["trainer.run"] = module
