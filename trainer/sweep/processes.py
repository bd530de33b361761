"""Processes of a sweep: run a cell to its end, and see to it that it leaves a record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.process import handled, present_handlers
from trainer.sweep.environment import CellEnvironment, cache_variables
from trainer.sweep.plan import REFUSED, PlannedCell
from trainer.telemetry.record import RunRecord

OUTPUT_NAME = "output.txt"
POLL_SECONDS = 0.05


@contextlib.contextmanager
def stopping_signals() -> Iterator[list[int]]:
    """The signals to stop that arrive inside, one after the other: the running cell decides how it ends."""
    found: list[int] = []
    with handled(dict.fromkeys(present_handlers(), lambda number, _: found.append(number))):
        yield found


def run_cell(cell: PlannedCell, signals: Sequence[int]) -> None:
    """Run ``cell`` to its end; sets its exit code and its record.

    ``signals`` are those that the sweep got, a list that grows; all are passed on.
    """
    set_aside(cell.directory)
    cell.directory.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **CellEnvironment(parent=os.getpid(), round=cell.round, start=cell.start).variables(),
    }
    if cell.caches is not None:
        if cell.start != "warm":
            shutil.rmtree(cell.caches, ignore_errors=True)
        environment |= cache_variables(cell.caches.resolve(), store=cell.start is not None)
    with (cell.directory / OUTPUT_NAME).open("ab") as output:
        # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
        # behind when it is killed can be killed with it.
        process = subprocess.Popen(
            cell.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            close_fds=False,  # it inherits the sweep's lock
        )
    passed_on = 0
    try:
        while (exit_code := process.poll()) is None:
            for number in signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            time.sleep(POLL_SECONDS)
    finally:  # at an error of ours, too: nothing may stay behind
        if process.poll() is None:
            process.terminate()
    if exit_code != 0:  # processes that it started, other ranks for instance
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    cell.record, cell.exit_code = _settled(cell, exit_code, signals), exit_code


def _settled(cell: PlannedCell, exit_code: int, signals: Sequence[int]) -> RunRecord:
    """The record that it left, or that is written for it: finished, interrupted or failed, and why."""
    record = loaded(cell.directory)
    if record is None:
        record = cell.record  # refused or dead before the first record
    if record.status in ("failed", "interrupted") or (exit_code == 0 and record.status == "finished"):
        return record
    if signals:
        record.status, record.signal = "interrupted", signals[-1]
        record.reason = signal.Signals(signals[-1]).name
    else:
        record.status, record.reason = "failed", _cause(cell, exit_code)
    record.save(cell.directory)
    return record


def _cause(cell: PlannedCell, exit_code: int) -> str:
    printed = _last_lines(cell.directory / OUTPUT_NAME)
    if exit_code == -signal.SIGKILL:
        return "killed (SIGKILL), as a system does that runs out of memory"
    if exit_code < 0:
        return f"killed ({signal.Signals(-exit_code).name})"
    errors = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
    if exit_code == REFUSED or errors:  # torchrun has an exit code of its own
        return f"refused: {errors[0] if errors else 'see its output'}"
    return f"crashed (exit code {exit_code})" + (f": {printed[-1]}" if printed else "")


def loaded(directory: Path) -> RunRecord | None:
    """The record that a cell has left."""
    with contextlib.suppress(ValueError):
        return RunRecord.load(directory)
    return None


def set_aside(directory: Path) -> None:
    """Move what an earlier attempt left out of the sweep, where neither TensorBoard nor a comparison finds it."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    aside = directory.parent.with_name(f"{directory.parent.name}-set-aside")
    aside.mkdir(exist_ok=True)
    target, count = aside / directory.name, 1
    while target.exists():
        count += 1
        target = aside / f"{directory.name}-{count}"
    directory.rename(target)


def _last_lines(file: Path) -> list[str]:
    """The last lines of a cell's output, without empty ones."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 4096))
        text = stream.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]
