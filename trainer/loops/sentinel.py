"""Sentinel: a small process that ends a training that stands still with Python's lock while another process has died.

``Watch`` ends its process from a thread, which needs that lock. Some calls into a CUDA driver keep it and wait for the
device, and the device for a collective of the dead process. That was seen while Inductor compiled. The sentinel holds
the same connections, and a pipe on which the thread shows that it runs. Run as a script: the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

PATIENCE_SECONDS = 15.0
"""How long the thread may be silent once another process has died."""


class Sentinel:
    """The sentinel of this process, until the process ends.

    Args:
        names: Of the processes, by rank.
        connections: To other processes, by rank.

    Raises:
        OSError: No process can be started.
    """

    def __init__(self, names: Sequence[str], connections: Mapping[int, socket.socket]) -> None:
        places = [f"{connection.fileno()}={rank}={names[rank]}" for rank, connection in connections.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(PATIENCE_SECONDS), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=[connection.fileno() for connection in connections.values()],
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def send(self, what: str = "") -> None:
        """The thread runs. ``-RANK``: that process may go; ``+RANK``: it trains again."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(f"{what}\n".encode())

    def forget(self) -> None:
        """In a fork of this process."""
        self._pipe.close()


def main(parent: int, patience_seconds: float, *places: str) -> None:
    """Look until the process ``parent`` ends, or end it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    ranks = {int(one.split("=")[0]): one.split("=", 2)[1:] for one in places}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    for descriptor in ranks:
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    lost: dict[str, str] = {}
    left: set[str] = set()
    heard, held = time.monotonic(), b""
    while os.getppid() == parent:
        for descriptor, _ in poll.poll(1000):
            if descriptor:
                poll.unregister(descriptor)
                rank, name = ranks[descriptor]
                if b'"inside": false' not in unread(descriptor):
                    lost[rank] = name
                continue
            came = os.read(0, 4096)
            if not came:
                return
            heard = time.monotonic()
            *lines, held = (held + came).split(b"\n")
            for line in lines:
                (left.discard if line[:1] == b"+" else left.add)(line[1:].decode())
        dead = [name for rank, name in lost.items() if rank not in left]
        if dead and time.monotonic() - heard > patience_seconds:
            reason = f"rank {dead[0]}: ended without a word; this process stood still, and is ended with it"
            with contextlib.suppress(OSError):
                os.write(2, f"failed: {reason}\n".encode())
            os.kill(parent, signal.SIGKILL)
            return


def unread(descriptor: int) -> bytes:
    """What the other end has sent before it ended, and nobody has read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.recv(65536, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
