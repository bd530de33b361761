"""Processes of a sweep: start its cells, watch their time, and see to it that each leaves a record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.process import present_handlers
from trainer.sweep.environment import CELL_VARIABLE, CellEnvironment, cache_variables
from trainer.sweep.plan import Entry, PlannedCell, quoted
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from trainer.sweep.sweep import Sweep

OUTPUT_NAME = "output.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
"""Where a run leaves its checkpoint."""
REFUSED = 2
"""Exit code of a command that was refused before any work."""
GRACE_SECONDS = 30.0
"""Time that a cell has to stop by itself when its time is up, before it is killed."""


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
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables: which GPUs it sees."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
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
        self._began, self._stopped = time.monotonic(), None
        with (cell.directory / OUTPUT_NAME).open("ab") as output:
            # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
            # behind when it is killed can be killed with it.
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
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
        if exit_code == REFUSED and self._resumed:  # a checkpoint that leaves nothing to do, or is not whole
            self._resumed = False
            set_aside(self.cell.directory)
            self.cell.directory.mkdir(parents=True)
            self._launch()
            return None
        return CellEnd(exit_code=exit_code, record=self._settled(exit_code), seconds=seconds)

    def _watch_time(self, seconds: float) -> None:
        assert self.process is not None
        if self.timeout_seconds is None or seconds < self.timeout_seconds:
            return
        if self._stopped is None:
            self._stopped = seconds
            self.process.terminate()
        elif seconds - self._stopped > GRACE_SECONDS:
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
        printed = last_lines(self.cell.directory / OUTPUT_NAME)
        if exit_code == -signal.SIGKILL:
            return "killed (SIGKILL), as a system does that runs out of memory"
        if exit_code < 0:
            return f"killed ({signal.Signals(-exit_code).name})"
        if exit_code == REFUSED:
            errors = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
            return f"refused: {errors[0] if errors else 'see its output'}"
        return f"crashed (exit code {exit_code})" + (f": {printed[-1]}" if printed else "")


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


POLL_SECONDS = 0.05


@dataclass(kw_only=True, slots=True)
class Signals:
    """Signals that arrived while the sweep ran; the running cells decide how they end, and no other one starts."""

    received: int | None = None
    pass_on: Callable[[int], None] = lambda number: None

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.pass_on(number)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Handle the signals that stop a run, and put the former handlers back."""
        before = {number: signal.signal(number, self.handle) for number in present_handlers()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(kw_only=True, slots=True)
class _Worker:
    """One of the places where cells run at once."""

    variables: dict[str, str]
    queue: list[PlannedCell] = field(default_factory=list)
    process: CellProcess | None = None


def run_queues(
    queues: Sequence[Sequence[PlannedCell]],
    sweep: Sweep,
    signals: Signals,
    *,
    places: Sequence[dict[str, str]],
) -> None:
    """Run every cell; each queue stays in one place, from its first cell to its last.

    Args:
        queues: Cells that must run one after the other, see ``plan.queues``.
        sweep: Decides what is left to do, and keeps how it ended.
        signals: A signal ends the running cells, and the sweep with them.
        places: Environment variables for each of the cells that run at once.
    """
    waiting = [list(queue) for queue in queues]
    workers = [_Worker(variables=variables) for variables in places]

    def pass_on(number: int) -> None:
        for worker in workers:
            if worker.process is not None:
                worker.process.send(number)

    signals.pass_on = pass_on
    try:
        while True:
            for worker in workers:
                _advance(worker, waiting, sweep, signals)
            if all(worker.process is None for worker in workers):
                return
            time.sleep(POLL_SECONDS)
    finally:
        for worker in workers:  # an error of ours: nothing may stay behind
            if worker.process is not None:
                worker.process.send(signal.SIGTERM)


def _advance(worker: _Worker, waiting: list[list[PlannedCell]], sweep: Sweep, signals: Signals) -> None:
    """See whether the worker's cell has ended, and start its next one."""
    if worker.process is not None:
        end = worker.process.poll()
        if end is None:
            return
        sweep.ended(worker.process.cell, end)
        worker.process = None
    while signals.received is None and (worker.queue or waiting):
        if not worker.queue:
            worker.queue = waiting.pop(0)
        cell = worker.queue.pop(0)
        if not sweep.wants(cell):
            continue
        process = sweep.process_of(cell, variables=worker.variables)
        sweep.starts(cell)
        pid = process.start()
        worker.process = process
        if signals.received is not None:  # it came between our looking and the start
            process.send(signals.received)
        sweep.note(cell, pid=pid)
        return


def host() -> str:
    """Name of this machine, by which processes of a shared directory are distinguished."""
    return socket.gethostname()


def wait_for(entry: Entry, report: Callable[[str], None]) -> None:
    """Wait until no process of this machine runs the cell any more; ``report`` that it waits, and for which."""
    if entry.pid is None or entry.host != host() or not _is_cell(entry.pid):
        return
    report(f"waiting for process {entry.pid}, which still runs cell {entry.number} of this sweep")
    while _is_cell(entry.pid):
        time.sleep(0.2)


def _is_cell(pid: int) -> bool:
    """Whether a process is a cell of a sweep, and not another one that got its number."""
    if Path("/proc/self/environ").exists():
        try:
            return f"{CELL_VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or somebody else's
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def visible_gpus() -> list[str]:
    """Names of the GPUs that a process of this machine would see, as ``CUDA_VISIBLE_DEVICES`` has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library: NVML has an error class for each, and so has its import
        return []


def places(parallel: int, gpus_per_cell: int, gpus: list[str]) -> list[dict[str, str]]:
    """Environment variables for each of the cells that run at once.

    Raises ValueError when there are fewer GPUs than they need: cells that share one measure each other.
    """
    if parallel == 1:
        return [{}]
    possible = len(gpus) // gpus_per_cell
    if parallel == -1:
        if not possible:
            raise ValueError(
                f"hydra.launcher.parallel=-1 is a cell for each {gpus_per_cell} of this machine's GPUs, and it has "
                f"{len(gpus)}; name a number"
            )
        parallel = possible
    if not gpus:
        return [{} for _ in range(parallel)]
    if parallel > possible:
        raise ValueError(
            f"hydra.launcher.parallel={parallel} must be at most {possible}: this machine has {len(gpus)} GPUs, each "
            f"cell takes {gpus_per_cell}, and cells that share one measure each other"
        )
    groups = [gpus[first : first + gpus_per_cell] for first in range(0, possible * gpus_per_cell, gpus_per_cell)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups[:parallel]]
