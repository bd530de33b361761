"""Cell process: starts one cell of a sweep, watches its time, and sees to it that it leaves a record.

Everything here can be pickled or runs in the process that starts the cell: this one, or a job's on a cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from trainer.sweep.cell_environment import CellEnvironment, cache_variables
from trainer.sweep.plan import PlannedCell
from trainer.sweep.quoting import quoted
from trainer.telemetry.record import RunRecord

OUTPUT_NAME = "output.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
"""Where a run leaves its checkpoint."""
REFUSED = 2
"""Exit code of a command that was refused before any work."""


@dataclass(kw_only=True, slots=True)
class CellEnd:
    """How a cell ended."""

    exit_code: int
    """Negative when a signal killed it."""
    record: RunRecord
    seconds: float


@dataclass(kw_only=True, slots=True)
class CellProcess:
    """One cell, to be started and then polled until it has ended."""

    cell: PlannedCell
    timeout_seconds: float | None
    grace_seconds: float
    to_file: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables: which GPUs it sees."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _output: IO[bytes] | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    _stopped: float | None = field(default=None, init=False)
    """When its time was up."""
    _signalled: int | None = field(default=None, init=False)
    """Signal that the sweep passed on."""
    _resumed: bool = field(default=False, init=False)

    def start(self) -> int:
        """Prepare its directory and caches, and start it, from its checkpoint when it has left one; its process."""
        cell = self.cell
        self._resumed = goes_on(cell)
        if not self._resumed:
            set_aside(cell.directory)
        cell.directory.mkdir(parents=True, exist_ok=True)
        if cell.caches is not None and cell.start != "warm":
            shutil.rmtree(cell.caches, ignore_errors=True)
        return self._launch()

    def _launch(self) -> int:
        cell = self.cell
        environment = {
            **os.environ,
            **self.variables,
            **({} if cell.caches is None else cache_variables(cell.caches.resolve(), store=cell.start is not None)),
            **CellEnvironment(parent=os.getpid(), round=cell.round, start=cell.start).variables(),
        }
        command = [*cell.command, *([f"resume={quoted(cell.directory.resolve())}"] if self._resumed else [])]
        self._output = (cell.directory / OUTPUT_NAME).open("ab") if self.to_file else None
        self._began, self._stopped = time.monotonic(), None
        # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
        # behind when it is killed can be killed with it.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output else None,
            process_group=0,
        )
        return self.process.pid

    def send(self, number: int) -> None:
        """Pass a signal on; the cell decides how it ends."""
        self._signalled = number
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def poll(self) -> CellEnd | None:
        """See whether it has ended, or has to, because its time is up."""
        assert self.process is not None
        exit_code = self.process.poll()
        seconds = time.monotonic() - self._began
        if exit_code is None:
            self._watch_time(seconds)
            return None
        if exit_code != 0:
            _kill_group(self.process.pid)  # processes that it started, other ranks for instance
        if self._output is not None:
            self._output.close()
        if exit_code == REFUSED and self._resumed:  # a checkpoint that leaves nothing to do, or is not whole
            self._resumed = False
            set_aside(self.cell.directory)
            self.cell.directory.mkdir(parents=True)
            self._launch()
            return None
        return CellEnd(exit_code=exit_code, record=self._settled(exit_code), seconds=seconds)

    def last_line(self) -> str:
        """What it printed last."""
        lines = last_lines(self.cell.directory / OUTPUT_NAME)
        return lines[-1] if lines else ""

    def _watch_time(self, seconds: float) -> None:
        assert self.process is not None
        if self.timeout_seconds is None or seconds < self.timeout_seconds:
            return
        if self._stopped is None:
            self._stopped = seconds
            self.process.terminate()
        elif seconds - self._stopped > self.grace_seconds:
            _kill_group(self.process.pid)

    def _settled(self, exit_code: int) -> RunRecord:
        """The record that it left, or that is written for it: finished, interrupted or failed, and why."""
        try:
            record = RunRecord.load(self.cell.directory)
        except ValueError:
            record = self.cell.described  # refused or dead before the first record
            record.command = list(self.cell.overrides)
        if exit_code == 0 and record.status == "finished":
            return record
        if self._stopped is not None:
            record.status = "failed"
            record.reason = f"given up after {self.timeout_seconds:g} s, the longest that a cell was to take"
        elif record.status not in ("failed", "interrupted"):
            asked = self._signalled is not None
            record.status = "interrupted" if asked else "failed"
            record.signal = self._signalled
            record.reason = signal.Signals(self._signalled or 0).name if asked else self._cause(exit_code)
        else:
            return record
        record.save(self.cell.directory)
        return record

    def _cause(self, exit_code: int) -> str:
        said = [line for line in last_lines(self.cell.directory / OUTPUT_NAME) if line.strip()]
        if exit_code == -signal.SIGKILL:
            return "killed (SIGKILL), as a system does that runs out of memory"
        if exit_code < 0:
            return f"killed ({signal.Signals(-exit_code).name})"
        if exit_code == REFUSED:
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
            return f"refused: {errors[0] if errors else 'see its output'}"
        return f"crashed (exit code {exit_code})" + (f": {said[-1]}" if said else "")


def goes_on(cell: PlannedCell) -> bool:
    """Whether the cell's directory holds an interrupted run and its checkpoint."""
    try:
        status = RunRecord.load(cell.directory).status
    except ValueError:
        return False
    return status in ("interrupted", "running") and (cell.directory / CHECKPOINT).is_file()


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


def last_lines(file: Path, *, size: int = 4096) -> list[str]:
    """The last lines of a text that may still grow; none when there is no such file."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
