"""Failures in a training of several processes: which one failed, and by what, in one line of each.

Nothing here ends a process that its launcher, its process group or its own error would not end. Torchrun's agent and
Lightning's launcher stop the others of a process that has died; a collective fails by its group's timeout, or as soon
as a connection breaks. A process that fails leaves its error in the group's store, where one that finds a broken
connection reads what is behind it. The processes that the command line has started itself are looked after by
``StartedProcesses``. And where NCCL's own watchdog is off, because graphs are captured, ``Deadline`` takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strategies.compile_errors import one_line
from trainer.loops.ranks import describe_process
from trainer.process import others
from trainer.telemetry.record import RunRecord

AND_SO = "; this process ends with it"
LEARN_SECONDS = 5.0
"""How long a process with a broken connection looks for what is behind it."""
GRACE_SECONDS = 10.0
"""How long this process has to end by its own error once one that it has started has died."""
STILL_SECONDS = 600.0
"""Without a batch, after which a run says where it is; half of what the processes wait for each other, if that is less,
so that it is said before a collective ends by its timeout."""
MAX_LINE = 2000
"""Characters of a line that fit into a pipe at once."""
CONSEQUENCE = re.compile(
    r"another process|connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|timed out|recvValue failed", re.I
)
"""Errors that are what others notice of a process that has failed."""
KEY = "crucible/failure"
"""In the store of the process group."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What ended one process."""

    rank: int
    line: str
    signum: int | None = None
    """The signal that asked it to stop."""


class RankFailed(RuntimeError):
    """Another process of the training has failed or died."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.line + AND_SO)
        self.signum = failure.signum


class Failures:
    """What the processes of one training fail by: the first error of all of them, in the store of their group.

    Made by all alike. A later training of the same group has a place of its own there.
    """

    _made = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # A name of torch's own: without it, a failure is a broken connection to the others.
        self._store: Any = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()
        self._key = f"{KEY}{Failures._made}"
        Failures._made += 1

    def root_cause(self, error: BaseException) -> BaseException:
        """``error``, by which this process ends; RankFailed where another one is behind it. Else the others find it."""
        if isinstance(error, RankFailed):
            return error
        broken = isinstance(error, Exception) and CONSEQUENCE.search(str(error)) is not None
        asked = getattr(error, "signum", None) == signal.SIGTERM  # perhaps by a launcher, since another has failed
        if (broken or asked) and (found := self._found(LEARN_SECONDS if broken else 0)) is not None:
            return RankFailed(found)
        if broken:
            return error
        signum = signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signum", None)
        line = f"rank {describe_process(self._rank)}: {one_line(error)}"[:MAX_LINE]
        with contextlib.suppress(Exception):  # whoever serves the store is gone
            own = json.dumps(dataclasses.asdict(Failure(self._rank, line, signum)))
            self._store.compare_set(self._key, "", own)
        return error

    def _found(self, seconds: float) -> Failure | None:
        """What another process has left, or died by."""
        until = time.monotonic() + seconds
        while True:
            if (failure := self.left()) is not None or (failure := dead_child()) is not None:
                return failure if failure.rank != self._rank else None
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)

    def left(self) -> Failure | None:
        """The first one that a process has left; None where nobody serves the store any more."""
        with contextlib.suppress(Exception):
            if self._rank:  # torch prints a page about a connection that is gone
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                socket.create_connection(address, timeout=LEARN_SECONDS).close()
            if self._store.check([self._key]):
                return Failure(**json.loads(self._store.get(self._key)))
        return None


# ---- processes that this one has started -----------------------------------------------------------------------------


def dead_child() -> Failure | None:
    """The first of the processes started here that has failed."""
    for rank, process in enumerate(others, start=1):
        if code := process.poll():
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Failure(rank, f"rank {describe_process(rank, process.pid)}: {how}")
    return None


class StartedProcesses:
    """Looks after the processes that this one has started: where one dies, this one ends with it, and the record in
    ``folder`` says so. They end with this one, see ``trainer.process.end_with_first``. ``left`` is what one of them has
    said of its failure."""

    def __init__(self, folder: Path, left: Callable[[], Failure | None]) -> None:
        self._folder, self._left = folder, left
        self._over = threading.Event()
        if others:
            threading.Thread(target=self._poll, name="started processes", daemon=True).start()

    def end(self) -> None:
        """This process ends; the others, which may wait for it in a collective, with it."""
        self._over.set()
        until = time.monotonic() + LEARN_SECONDS
        for process in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
            process.kill()

    def wait(self) -> None:
        """Wait for the end of all. Raises RankFailed where one fails at that."""
        for process in others:
            process.wait()
        if (failure := dead_child()) is not None:
            raise RankFailed(self._left() or failure)

    def _poll(self) -> None:
        while (failure := dead_child()) is None:
            if self._over.wait(0.5):
                return
        if self._over.wait(GRACE_SECONDS):
            return
        failed = RankFailed(self._left() or failure)
        for process in others:
            process.kill()
        fail_record(self._folder, str(failed))
        print_error(f"failed: {failed}")
        os._exit(1)


def fail_record(folder: Path, reason: str) -> None:
    """Write into the record of ``folder`` that its run has failed, unless something has ended it already."""
    with contextlib.suppress(OSError, ValueError):
        record = RunRecord.load(folder)
        if record.status == "running":
            record.status, record.reason = "failed", reason
            record.save(folder)


def print_error(text: str) -> None:
    """Not print: whatever the main thread is doing to the stream."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


# ---- standing still --------------------------------------------------------------------------------------------------


class Deadline:
    """Says where this process is when no batch has begun for ten minutes: its stacks, once for each such time.

    ``timeout_seconds`` is how long the processes wait for each other. One that ``captures`` collectives prints where it
    is and ends where the device works on one batch for so long: a collective that waits for a process which does not
    come never ends, and NCCL's own watchdog is off then. A host that is slow is never ended.
    """

    def __init__(self, rank: int, timeout_seconds: float = math.inf, *, captures: bool = False) -> None:
        self._rank, self._timeout_seconds = rank, timeout_seconds
        self._event = torch.cuda.Event() if captures else None
        self._batches = self._step = 0
        self._marked_at: float | None = None
        self._over = threading.Event()
        threading.Thread(target=self._poll, name="deadline", daemon=True).start()

    def batch_begins(self, step: int) -> None:
        self._batches, self._step = self._batches + 1, step

    def batch_ends(self) -> None:
        """What the device has to do up to now counts from now."""
        if self._event is not None and (self._marked_at is None or self._event.query()):
            self._event.record()
            self._marked_at = time.monotonic()

    def end(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        seen, since, told = 0, time.monotonic(), False
        while not self._over.wait(1.0):
            now = time.monotonic()
            if self._batches != seen:
                seen, since, told = self._batches, now, False
            elif not told and now - since > min(STILL_SECONDS, self._timeout_seconds / 2):
                told = True
                print_error(f"no batch for {now - since:.0f} s, {self._where()}")
            if self._stands_still(now):
                print_error(
                    f"failed: the device has worked on one batch for {self._timeout_seconds:.0f} s, as it does in a "
                    f"collective to which another process does not come, {self._where()}"
                )
                os._exit(1)

    def _stands_still(self, now: float) -> bool:
        if self._event is None or self._marked_at is None:
            return False
        return now - self._marked_at > self._timeout_seconds and not self._event.query()

    def _where(self) -> str:
        """Rank and step, and the stacks of all threads but this one."""
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        names = {one.ident: one.name for one in threading.enumerate()}
        stacks = [
            f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
            for thread, frame in frames.items()
        ]
        return f"rank {describe_process(self._rank)}, step {self._step}\n{''.join(stacks)}"
