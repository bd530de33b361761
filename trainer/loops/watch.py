"""Watch: a process that fails or dies ends the others of its training within seconds, in one line that names it.

Each process has a sentinel, and each sentinel a connection to the first process's, which passes on what it hears. A
process that is slow, or holds Python's lock in a long compile, is no fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from strategies.errors import one_line, origin_of
from trainer.loops.processes import host_group
from trainer.loops.sentinel import AND_SO, GRACE_SECONDS, Record, Sentinel, print_error
from trainer.process import others

ROOT = Path(__file__).parents[2]
CONNECT_SECONDS = 20.0
LEARN_SECONDS = 5.0
"""How long a process that lost another one waits to hear why."""
END_SECONDS = 20.0
"""How long a process that has trained to the end waits for the others to say the same."""
MAX_LINE = 2000
"""Characters of a line that fit into a pipe at once."""
CONSEQUENCE = re.compile(
    r"another process|connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|timed out", re.I
)
"""Errors that are what others notice of a process that has failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What ended one process."""

    rank: int
    line: str
    signum: int | None = None
    """The signal that asked it to stop."""


class RankFailed(RuntimeError):
    """Another process of the training has failed or died."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.line + AND_SO)
        self.signum = fault.signum


class Watch:
    """The watch of one process over the others: ``names`` are by rank, and so are ``connections``, to all others on the
    first process and elsewhere to that one. Raises OSError where the sentinel cannot be started."""

    def __init__(self, rank: int, names: list[str], connections: Mapping[int, socket.socket]) -> None:
        self.rank, self._names = rank, names
        self.fault: Fault | None = None
        self._learned = threading.Event()
        self._inside = dict.fromkeys(connections, True)
        self._batches = 0
        self._sentinel = Sentinel(rank, names, connections)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def keep(self, record: Path) -> None:
        """Have this file say why, where this process can no longer write it."""
        self._sentinel.send(record=str(record.absolute()))

    def begin(self) -> None:
        """Another training of the same processes begins."""
        self._learned.clear()
        self.fault = None
        self._sentinel.send(inside=True)

    def end(self) -> None:
        """This process has trained to the end, and may go."""
        self._sentinel.send(inside=False)

    def wait(self) -> None:
        """Wait until the others have ended their training, too. Raises RankFailed where one of them fails at that."""
        until = time.monotonic() + END_SECONDS
        while self.fault is None and any(self._inside.values()) and time.monotonic() < until:
            time.sleep(0.01)
        self.check()

    def check(self) -> None:
        """A batch begins. Raises RankFailed where another process has failed."""
        self._batches += 1
        if self.fault is not None and self.fault.rank != self.rank:
            raise RankFailed(self.fault)

    def failed(self, error: BaseException) -> BaseException:
        """The training ends here by ``error``: tell the others. Returns what is behind it: RankFailed where that is
        another process."""
        self._sentinel.send(ending=True)
        if isinstance(error, RankFailed) or CONSEQUENCE.search(str(error)):
            self._learned.wait(LEARN_SECONDS)
            if self.fault is not None and self.fault.rank != self.rank:
                return RankFailed(self.fault)
        signum = signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signum", None)
        fault = Fault(self.rank, f"rank {self._names[self.rank]}: {one_line(error)}"[:MAX_LINE], signum)
        self._sentinel.send(fault=dataclasses.asdict(fault))
        return error

    def _listen(self) -> None:
        """Hear what the sentinel says, and say once a second whether this process moves."""
        still: Any = None
        for message in self._sentinel.heard(every_seconds=1.0):
            if "fault" in message:
                self.fault = Fault(**message["fault"])
                self._learned.set()
            elif "exit" in message:
                os._exit(message["exit"])
            elif "inside" in message:
                self._inside[message["rank"]] = message["inside"]
            elif (at := (self._batches, _place())) != still:
                still = at
                self._sentinel.send(moves=True)


def _place() -> tuple[int, int]:
    """Where the main thread is. Apart, because a frame that is kept keeps all tensors of its function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return id(frame), getattr(frame, "f_lasti", 0)


_current: tuple[object, Watch | None] = object(), None


def watch(rank: int, facts: Mapping[str, str], launcher: Any = None) -> Watch | None:
    """Watch over all processes of the group, from now until ``Watch.end``; all of them call it. None where they cannot
    reach each other. ``launcher`` is Lightning's, which may have started the others of a script.

    Raises ValueError, in all processes alike, where ``facts`` (by name) differ between them.
    """
    global _current
    known = _current[0] is dist.group.WORLD
    server = socket.create_server(("", 0)) if rank == 0 and not known else None
    gathered: list[Any] = [None] * dist.get_world_size()
    port, token = (server.getsockname()[1], secrets.token_hex()) if server else (None, None)
    name = name_of(rank)
    dist.all_gather_object(gathered, (name, dict(facts), port, token), group=host_group())
    names = [one[0] for one in gathered]
    for other, (_, theirs, *_) in enumerate(gathered):
        for what in {**gathered[0][1], **theirs}:
            first, value = gathered[0][1].get(what), theirs.get(what)
            if first != value:
                raise ValueError(
                    f"rank {names[other]} has {what} {value}, rank {names[0]} has {first}: all processes of a training "
                    "need the same"
                )
    if known:
        if _current[1] is not None:
            _current[1].begin()
        return _current[1]
    if (procs := getattr(launcher, "procs", None)) and isinstance(procs[0], subprocess.Popen):
        launcher.procs = procs.copy()
        procs.clear()  # of the list that Lightning's own watch has, which kills this process without its record
    made = None
    try:
        made = Watch(rank, names, _connected(rank, server, *gathered[0][2:]))
    except OSError as error:
        rank_zero_warn(f"processes that die are not noticed, they cannot reach rank {names[0]}: {error}")
    _current = dist.group.WORLD, made
    while until_watched:
        until_watched.pop()()
    return made


until_watched: list[Callable[[], object]] = []
"""What ends once the processes watch over each other."""


def name_of(rank: int, pid: int | None = None) -> str:
    return f"{rank} ({socket.gethostname()}, pid {pid or os.getpid()})"


def watch_others(record: Path) -> None:
    """See to the ``others`` that this process has started, until ``watch`` sees them all: where one dies before, this
    one ends with it, and ``record`` says so."""
    if others:
        until_watched.append(_watched.set)
        threading.Thread(target=_look, args=(Record(str(record)),), name="others", daemon=True).start()


_watched = threading.Event()


def _dead() -> Fault | None:
    """The first of the others that has died. Who trains without ``watch`` may leave with exit code 0 at the end."""
    for rank, process in enumerate(others, start=1):
        if code := process.poll():
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Fault(rank, f"rank {name_of(rank, process.pid)}: {how}")
    return None


def _look(record: Record) -> None:
    while (fault := _dead()) is None:
        if _watched.wait(0.5):
            return
    if _watched.wait(GRACE_SECONDS):  # in which this process may end by itself, with its own reason
        return
    for process in others:
        process.kill()
    record.end(str(RankFailed(fault)))
    print_error(f"failed: {RankFailed(fault)}")
    os._exit(1)


def behind(error: BaseException) -> BaseException:
    """``error`` before ``watch``, or the death of another process, where that is what this one has noticed."""
    if others and not _watched.is_set() and CONSEQUENCE.search(str(error)):
        _watched.wait(LEARN_SECONDS)
        if (fault := _dead()) is not None:
            return RankFailed(fault)
    return error


def _connected(rank: int, server: socket.socket | None, port: int, token: str) -> dict[int, socket.socket]:
    if server is None:
        own = socket.create_connection((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), CONNECT_SECONDS)
        own.sendall(f"{token}{rank:8}".encode())
        own.settimeout(None)
        return {0: own}
    found: dict[int, socket.socket] = {}
    with server:
        server.settimeout(CONNECT_SECONDS)
        while len(found) < dist.get_world_size() - 1:
            one, _ = server.accept()
            one.settimeout(CONNECT_SECONDS)
            received = one.recv(len(token) + 8, socket.MSG_WAITALL).decode(errors="replace")
            if received[: len(token)] == token:
                one.settimeout(None)
                found[int(received[len(token) :])] = one
    for one in found.values():  # where a host is gone without a word
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return found


def code_of(module: nn.Module) -> dict[str, str]:
    """Checksums of the files that hold the code of ``module`` and of this project, by what they are."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    own = sorted(file for file in files if file and origin_of(file) == "other")
    sums = {f"code of {Path(file).name}": checksum(Path(file)) for file in own}
    here = [file for name in ("strategies", "trainer") for file in (ROOT / name).rglob("*.py")]
    return {"this project's code": checksum(*here), **sums}


def checksum(*files: Path) -> str:
    """Of what ``files`` hold, eight digits; a file that cannot be read counts as empty."""
    total = 0
    for file in sorted(files):
        with contextlib.suppress(OSError):
            total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"
