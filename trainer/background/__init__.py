"""Background: a helper process that compiles the regions of a program while the training continues without them.

This file is the process as the training sees it. The helper takes seconds to import the compiler, and so starts as soon
as the strategies are known, on the command line before the training imports torch: nothing of torch is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from strategies.base import Strategy
from strategies.modules import TOGETHER, usable_cores
from strategies.modules import Background as Options

MAX_WORKERS = 8
"""Compile workers of a helper; half of the cores where these are fewer."""
READ_ONCE = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of variables that a compiler reads as it is imported, but for ``CACHES``."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def environment() -> dict[str, str]:
    """That of a helper: this process's, with a number of compile workers and the folders that modules come from."""
    folders = os.pathsep.join(path or os.getcwd() for path in sys.path)
    workers = str(max(1, min(MAX_WORKERS, usable_cores() // 2)))
    return {"TORCHINDUCTOR_COMPILE_THREADS": workers, **os.environ, "PYTHONPATH": folders}


class Helper:
    """One helper process. It ends at ``end``, and by itself once this process is gone or it uses ``max_host_gib`` of
    memory. Raises OSError where none can be started."""

    def __init__(self, max_host_gib: float) -> None:
        self.max_host_gib = max_host_gib
        self._owner, self._environment = os.getpid(), environment()
        # Files without names: none is left, however the two processes end.
        self._errors, self._requests = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._unread = b""
        arguments = [max_host_gib, self._requests.fileno(), self._owner]
        self._process = subprocess.Popen(
            # -P: a file of the user's that is named as one of our packages hides nothing
            [sys.executable, "-P", "-m", "trainer.background.helper", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
            pass_fds=[self._requests.fileno()],
            start_new_session=True,  # the keyboard's interrupt is for the training, which ends its helper
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def serves(self, max_host_gib: float) -> bool:
        """Whether it can compile for this process now: it lives, and read the settings that hold here."""
        if self._owner != os.getpid() or self._process.poll() is not None or self.max_host_gib != max_host_gib:
            return False
        now, then = environment(), self._environment
        changed = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
        return not any(name.startswith(READ_ONCE) for name in changed.difference(CACHES))

    def send(self, request: bytes) -> None:
        """Ask for what a pickled ``wire.Request`` says; never waits. Raises OSError."""
        offset = self._requests.seek(0, os.SEEK_END)
        self._requests.write(request)
        self._requests.flush()
        self._stdin.write(f"{offset} {len(request)}\n".encode())  # far less than a pipe holds
        self._stdin.flush()

    def messages(self) -> tuple[list[Any], str | None]:
        """What it has reported since the last time, and why nothing more will come, if so; never waits."""
        ended = self._process.poll() is not None  # asked first: what it wrote before is then all there
        with contextlib.suppress(OSError):
            while chunk := self._stdout.read(1 << 16):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # what else some library prints
                found.append(json.loads(line))
        if not ended:
            return found, None
        self._errors.seek(0)
        error_lines = self._errors.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        last = f": {error_lines[-1][:200]}" if error_lines and code >= 0 else ""  # who is killed has no last word
        return found, f"the helper ended with code {code}{last}"

    def end(self, *, at_once: bool = False) -> None:
        """Let it end its workers and itself; ``at_once``: kill it, where it may be past reading that it is to end."""
        if self._owner == os.getpid():  # else this process was forked, and the helper is another's
            if at_once:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                # Written, too: a data worker that was forked keeps the pipe open.
                self._stdin.write(b"\n")
                self._stdin.flush()
        for file in (self._stdin, self._stdout, self._errors, self._requests):
            with contextlib.suppress(OSError):
                file.close()
        # Nobody waits for it here: subprocess does, when it starts the next process.


# ---- the one that starts before it is needed -------------------------------------------------------------------------

_early: list[Helper] = []


def start_early(options: Options | None) -> None:
    """Start the helper that is going to be needed, if there is none."""
    if options is not None:
        with contextlib.suppress(OSError):  # comes up again, with its reason, where it is needed
            _early.append(take(options))


@contextlib.contextmanager
def early(strategies: Iterable[Strategy]) -> Iterator[None]:
    """Inside, a helper waits to be taken, where ``strategies`` and this machine have use for one; one that nobody has
    taken ends with it."""
    given = list(strategies)
    if all(one.name in TOGETHER or one.chooser is not None for one in given):
        start_early(next((one.helper for one in given if isinstance(one.helper, Options)), None))
    try:
        yield
    finally:
        release()


def take(options: Options) -> Helper:
    """The helper that has started early, where it can be used, else a new one. Raises OSError."""
    if _early and _early[0].serves(options.max_host_gib):
        return _early.pop()
    release()
    return Helper(options.max_host_gib)


def release() -> None:
    """No helper is needed, or no further one: end that which nobody has taken."""
    while _early:
        _early.pop().end()
