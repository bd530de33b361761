"""Sentinel: a small process that writes into the record how its process was killed, and ends one that stands still with
Python's lock while another process has died.

``Watch`` ends its process from a thread, which needs that lock. Some calls into a CUDA driver keep it and wait for the
device, and the device for a collective of the dead process. That was seen while Inductor compiled. The sentinel holds
the same connections, and a pipe on which the thread shows that it runs. Run as a script: the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE_SECONDS = 15.0
"""How long the thread may be silent once another process has died."""


class Sentinel:
    """The sentinel of this process, until the process ends.

    Args:
        rank: Of this process.
        names: Of the processes, by rank.
        connections: To other processes, by rank.

    Raises:
        OSError: No process can be started.
    """

    def __init__(
        self, rank: int, names: Sequence[str] | Mapping[int, str], connections: Mapping[int, socket.socket]
    ) -> None:
        places = [f"{connection.fileno()}={rank}={names[rank]}" for rank, connection in connections.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(PATIENCE_SECONDS), names[rank], *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # torchrun kills a process with its group
            pass_fds=[connection.fileno() for connection in connections.values()],
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def send(self, what: str = "") -> None:
        """The thread runs. ``-RANK``: that process may go; ``+RANK``: it trains again; ``=FILE``: the record as it is
        now."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(f"{what}\n".encode())

    def end(self) -> None:
        """The process can speak for itself from now on."""
        self.send("=")
        self.close()

    def close(self) -> None:
        """This is a fork of the process."""
        self._pipe.close()


class Record:
    """The record of a training that runs.

    Args:
        file: What holds it, or will; empty for nothing.
    """

    def __init__(self, file: str) -> None:
        self._file, self._written = file, _written(file)

    def end(self, reason: str) -> None:
        """Write that it failed for ``reason``, unless somebody has written there since."""
        if self._written is not None and self._written != _written(self._file):
            return
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(Path(self._file).read_text(encoding="utf-8"))
            if values["status"] == "running":
                new = Path(f"{self._file}.{os.getpid()}")
                new.write_text(json.dumps({**values, "status": "failed", "reason": reason}, indent=1), encoding="utf-8")
                os.replace(new, self._file)


def _written(file: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return None


def main(parent: int, patience_seconds: float, name: str, *places: str) -> None:
    """Look until the process ``parent``, called ``name``, ends, or end it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    ranks = {int(one.split("=")[0]): one.split("=", 2)[1:] for one in places}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    for descriptor in ranks:
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    lost: dict[str, str] = {}
    left: set[str] = set()
    record = Record("")
    heard, held = time.monotonic(), b""
    alive = True
    while alive:
        alive = os.getppid() == parent  # asked before reading: its last words come in any case
        for descriptor, _ in poll.poll(1000 if alive else 0):
            if descriptor:
                poll.unregister(descriptor)
                rank, other = ranks[descriptor]
                if b'"inside": false' not in unread(descriptor):
                    lost[rank] = other
                continue
            came = os.read(0, 4096)
            if not came:
                alive = False
                break
            heard = time.monotonic()
            *lines, held = (held + came).split(b"\n")
            for line in lines:
                kind, what = line[:1], line[1:].decode()
                if kind == b"=":
                    record = Record(what)
                else:
                    (left.discard if kind == b"+" else left.add)(what)
        dead = [other for rank, other in lost.items() if rank not in left]
        if alive and dead and time.monotonic() - heard > patience_seconds:
            reason = f"rank {dead[0]}: ended without a word; this process stood still, and is ended with it"
            with contextlib.suppress(OSError):
                os.write(2, f"failed: {reason}\n".encode())
            record.end(reason)
            os.kill(parent, signal.SIGKILL)
            return
    record.end(f"rank {name}: ended without a word")


def unread(descriptor: int) -> bytes:
    """What the other end has sent before it ended, and nobody has read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.recv(65536, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
