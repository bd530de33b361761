"""Sentinel: a small process beside each process of a training, which hears of the others and ends its own where it
stands still.

A process that waits in a collective for a dead one, or in a call that keeps Python's lock, cannot end itself. So the
connections between processes are the sentinels'. A sentinel passes on that its process fails or dies, writes that into
the record, and ends its process some seconds after another one has failed. Run as a script: the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_SECONDS = 8.0
"""How long a process may go on once another one has failed, or stand still while it ends for a reason of its own."""
EXIT_SECONDS = 2.0
"""How long a process has to leave with an exit code of its own."""
AND_SO = "; this process ends with it"


class Sentinel:
    """The sentinel of the process ``rank``, which is this one, until it ends. ``names`` of the processes, and
    ``connections`` to the sentinels of others, are by rank. Raises OSError where no process can be started."""

    def __init__(
        self, rank: int, names: Sequence[str] | Mapping[int, str], connections: Mapping[int, socket.socket]
    ) -> None:
        places = [f"{connection.fileno()}={other}={names[other]}" for other, connection in connections.items()]
        given = map(str, (os.getpid(), GRACE_SECONDS, rank))
        self._connections = connections  # open here, too: nobody loses this process by the end of its sentinel
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *given, names[rank], *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # torchrun kills a process with its group
            pass_fds=[connection.fileno() for connection in connections.values()],
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def send(self, **what: Any) -> None:
        """``record``: the file with the record as it is now. ``inside``: whether this process trains. ``fault``: what
        it fails by. ``ending``: it ends by itself. ``moves``: it does not stand still."""
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(json.dumps(what).encode() + b"\n")

    def heard(self, every_seconds: float) -> Iterator[dict[str, Any]]:
        """What it says until it ends, and an empty dictionary each time it has been silent for ``every_seconds``."""
        assert self._process.stdout is not None
        held, selector = b"", selectors.DefaultSelector()
        selector.register(self._process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(every_seconds):
                yield {}
                continue
            came = os.read(self._process.stdout.fileno(), 4096)
            if not came:
                return
            *lines, held = (held + came).split(b"\n")
            yield from map(json.loads, lines)

    def end(self) -> None:
        """The process can speak for itself from now on."""
        self.send(record="")
        self._pipe.close()


class Record:
    """The record of a running training in ``file``, which may not be there yet; an empty name: no record."""

    def __init__(self, file: str) -> None:
        self._file, self._written = file, _written(file)

    def end(self, reason: str, signum: int | None = None) -> None:
        """Write that it failed for ``reason``, or was interrupted, unless somebody has written there since."""
        if self._written is not None and self._written != _written(self._file):
            return
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(Path(self._file).read_text(encoding="utf-8"))
            if values["status"] == "running":
                ending = {"status": "failed" if signum is None else "interrupted", "reason": reason, "signal": signum}
                new = Path(f"{self._file}.{os.getpid()}")
                new.write_text(json.dumps({**values, **ending}, indent=1), encoding="utf-8")
                os.replace(new, self._file)


def _written(file: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return None


class Supervision:
    """What a sentinel knows of its process ``parent`` and of the others."""

    def __init__(self, parent: int, grace_seconds: float, rank: int, name: str, *places: str) -> None:
        self._parent, self._grace_seconds, self._rank, self._name = parent, grace_seconds, rank, name
        self._others: dict[int, socket.socket] = {}
        self._names: dict[int, str] = {}
        for descriptor, other, its_name in (place.split("=", 2) for place in places):
            self._others[int(other)], self._names[int(other)] = socket.socket(fileno=int(descriptor)), its_name
        self._training = set(self._others)
        self._inside, self._ending = True, False
        self._fault: dict[str, Any] | None = None
        self._fault_at = self._moved_at = time.monotonic()
        self._record = Record("")

    def run(self) -> None:
        selector, held = selectors.DefaultSelector(), dict[int, bytes]()
        selector.register(0, selectors.EVENT_READ)
        for other, connection in self._others.items():
            selector.register(connection, selectors.EVENT_READ, other)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them: its end is seen within a second
            selector.register(os.pidfd_open(self._parent), selectors.EVENT_READ)
        alive = True
        while alive:
            alive = self._is_alive()  # asked before reading: its last words come in any case
            for key, _ in selector.select(1 if alive else 0):
                came = b""
                with contextlib.suppress(OSError):
                    came = os.read(key.fd, 4096)
                if came:
                    *lines, held[key.fd] = (held.get(key.fd, b"") + came).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line), key.data)
                    continue
                selector.unregister(key.fileobj)
                if key.data is None:
                    alive = False
                elif key.data in self._training:
                    self._find(ended_without_a_word(key.data, self._names[key.data]), key.data)
            if alive:
                self._end_what_stands_still()
        if self._inside:
            fault = self._fault or ended_without_a_word(self._rank, self._name)
            self._end_record(fault)
            if self._fault is None and self._others and not self._rank:
                print_error(f"failed: {fault['line']}")
            self._find(fault)

    def _is_alive(self) -> bool:
        return os.getppid() == self._parent

    def _hear(self, message: dict[str, Any], other: int | None) -> None:
        if "fault" in message:
            self._find(message["fault"], other)
        elif other is not None:
            (self._training.add if message["inside"] else self._training.discard)(other)
            self._report({"rank": other, **message})
        elif "inside" in message:
            self._inside = message["inside"]
            if self._inside:
                self._fault, self._ending = None, False
            self._pass_on(message)
        elif "record" in message:
            self._record = Record(message["record"])
        else:
            self._ending = self._ending or "ending" in message
            self._moved_at = time.monotonic()

    def _find(self, fault: dict[str, Any], heard_from: int | None = None) -> None:
        if self._fault is None and (self._inside or fault["rank"] != self._rank):
            self._fault, self._fault_at = fault, time.monotonic()
            self._report({"fault": fault})
            self._pass_on({"fault": fault}, but=heard_from)

    def _report(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(what).encode() + b"\n")

    def _pass_on(self, what: dict[str, Any], but: int | None = None) -> None:
        for other, connection in self._others.items():
            if other != but:
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps(what).encode() + b"\n")

    def _end_what_stands_still(self) -> None:
        """End the process where it is: its main thread waits for one that is gone."""
        now, fault = time.monotonic(), self._fault
        if fault is None or not self._inside or now - self._fault_at < self._grace_seconds:
            return
        if self._ending and now - self._moved_at < self._grace_seconds:
            return
        self._end_record(fault)
        if not self._rank:
            print_error(f"{'failed' if fault['signum'] is None else 'interrupted'}: {self._consequence(fault)}")
        self._report({"exit": 1 if fault["signum"] is None else 128 + fault["signum"]})
        until = time.monotonic() + EXIT_SECONDS
        while self._is_alive() and time.monotonic() < until:
            time.sleep(0.05)
        if self._is_alive():
            os.kill(self._parent, signal.SIGKILL)
        self._inside = False

    def _end_record(self, fault: dict[str, Any]) -> None:
        self._record.end(self._consequence(fault), fault["signum"])

    def _consequence(self, fault: dict[str, Any]) -> str:
        return fault["line"] if fault["rank"] == self._rank else fault["line"] + AND_SO


def ended_without_a_word(rank: int, name: str) -> dict[str, Any]:
    return {"rank": rank, "line": f"rank {name}: ended without a word", "signum": None}


def print_error(line: str) -> None:
    """Not print: whatever the main thread is doing to the stream."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    for _signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_signum, signal.SIG_IGN)
    Supervision(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]).run()
