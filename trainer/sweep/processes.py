"""Processes of a sweep: run a cell to its end, watch its time, and see to it that it leaves a record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from trainer.process import handled, present_handlers
from trainer.sweep.environment import CELL_VARIABLE, CellEnvironment, cache_variables
from trainer.sweep.plan import REFUSED, PlannedCell, quoted
from trainer.telemetry.record import RunRecord

OUTPUT_NAME = "output.txt"
CHECKPOINT = Path("checkpoints") / "last.ckpt"
"""Where a run leaves its checkpoint."""
GRACE_SECONDS = 30.0
"""Time that a cell has to stop by itself when its time is up, before it is killed."""


@contextlib.contextmanager
def stopping_signals() -> Iterator[list[int]]:
    """The signals to stop that arrive inside, one after the other: running cells decide how they end."""
    found: list[int] = []
    with handled(dict.fromkeys(present_handlers(), lambda number, _: found.append(number))):
        yield found


class CellProcess:
    """One cell, from the start of its process to its record.

    Args:
        cell: What to run.
        variables: Further environment variables: which GPUs it sees.
        timeout_seconds: Its longest time; None = no limit.
        signals: Those that the sweep got, a list that grows; all are passed on.
    """

    def __init__(
        self, cell: PlannedCell, variables: dict[str, str], timeout_seconds: float | None, signals: list[int]
    ) -> None:
        self._cell, self._variables = cell, variables
        self._timeout_seconds, self._signals = timeout_seconds, signals
        self._given_up = False
        self.seconds = 0.0

    def run(self, started: Callable[..., None]) -> Generator[bool, None, None]:
        """Run it from its checkpoint, where it has left one, and yield until it has ended, with exit code and record;
        ``started`` gets the number of its process."""
        cell = self._cell
        resumes = goes_on(cell.directory)
        if cell.caches is not None and cell.entry.start != "warm":
            shutil.rmtree(cell.caches, ignore_errors=True)
        exit_code = yield from self._attempt(started, resumes=resumes)
        if exit_code == REFUSED and resumes:  # a checkpoint that leaves nothing to do, or is not whole
            exit_code = yield from self._attempt(started, resumes=False)
        cell.record, cell.exit_code = self._settled(exit_code), exit_code

    def _attempt(self, started: Callable[..., None], *, resumes: bool) -> Generator[bool, None, int]:
        cell = self._cell
        if not resumes:
            set_aside(cell.directory)
        cell.directory.mkdir(parents=True, exist_ok=True)
        caches = cell.caches
        environment = {
            **os.environ,
            **self._variables,
            **({} if caches is None else cache_variables(caches.resolve(), store=cell.entry.start is not None)),
            **CellEnvironment(parent=os.getpid(), round=cell.entry.round, start=cell.entry.start).variables(),
        }
        began, passed_on = time.monotonic(), 0
        with (cell.directory / OUTPUT_NAME).open("ab") as output:
            # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
            # behind when it is killed can be killed with it.
            process = subprocess.Popen(
                [*cell.command, *([f"resume={quoted(cell.directory.resolve())}"] if resumes else [])],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            started(pid=process.pid)
            while (exit_code := process.poll()) is None:
                for number in self._signals[passed_on:]:
                    process.send_signal(number)
                    passed_on += 1
                over = time.monotonic() - began - (self._timeout_seconds or 0)
                if self._timeout_seconds is not None and over >= 0 and not self._given_up:
                    self._given_up = True
                    process.terminate()
                elif self._timeout_seconds is not None and over > GRACE_SECONDS:
                    _kill_group(process.pid)
                yield True
        finally:  # at an error of ours, too: nothing may stay behind
            if process.poll() is None:
                process.terminate()
        self.seconds = time.monotonic() - began
        if exit_code != 0:
            _kill_group(process.pid)  # processes that it started, other ranks for instance
        return exit_code

    def _settled(self, exit_code: int) -> RunRecord:
        """The record that it left, or that is written for it: finished, interrupted or failed, and why."""
        cell = self._cell
        try:
            record = RunRecord.load(cell.directory)
        except ValueError:
            record = cell.record  # refused or dead before the first record
            record.command = list(cell.entry.overrides)
        if exit_code == 0 and record.status == "finished":
            return record
        if self._given_up:
            record.status = "failed"
            record.reason = f"given up after {self._timeout_seconds:g} s, the longest that a cell was to take"
        elif record.status in ("failed", "interrupted"):
            return record
        elif self._signals:
            record.status, record.signal = "interrupted", self._signals[-1]
            record.reason = signal.Signals(self._signals[-1]).name
        else:
            record.status, record.reason = "failed", self._cause(exit_code)
        record.save(cell.directory)
        return record

    def _cause(self, exit_code: int) -> str:
        printed = _last_lines(self._cell.directory / OUTPUT_NAME)
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


def goes_on(directory: Path) -> bool:
    """Whether a cell's directory holds an interrupted run and its checkpoint."""
    record = loaded(directory)
    interrupted = record is not None and record.status in ("interrupted", "running")
    return interrupted and (directory / CHECKPOINT).is_file()


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


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def is_cell(pid: int) -> bool:
    """Whether a process is a cell of a sweep, and not another one that got its number."""
    with contextlib.suppress(OSError):  # gone, or somebody else's
        return f"{CELL_VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


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
    if parallel == -1 and not possible:
        raise ValueError(
            f"hydra.launcher.parallel=-1 is a cell for each {gpus_per_cell} of this machine's GPUs, and it has "
            f"{len(gpus)}; name a number"
        )
    number = possible if parallel == -1 else parallel
    if not gpus:
        return [{} for _ in range(number)]
    if number > possible:
        raise ValueError(
            f"hydra.launcher.parallel={parallel} must be at most {possible}: this machine has {len(gpus)} GPUs, each "
            f"cell takes {gpus_per_cell}, and cells that share one measure each other"
        )
    groups = [gpus[first : first + gpus_per_cell] for first in range(0, number * gpus_per_cell, gpus_per_cell)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
