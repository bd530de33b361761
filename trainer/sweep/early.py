"""Further processes of a run on one host's devices, started while the first one still has torch to import.

Lightning starts them when everything is built, and their imports come on top: 6 s on a quiet machine. Those started
here import the same, and wait until Lightning asks for a process: they then become it. Lightning starts its own where
anything is unlike what it asks for. Part of the Hydra edge; no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.process import signal_at_end_of_parent

if TYPE_CHECKING:
    from trainer.settings import TrainerConfig

PIPE = "CRUCIBLE_EARLY_PROCESS"
"""Holds the descriptor on which a process that was started early is told what to be."""
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp2")
"""Those of ``trainer.strategy`` that run the command again for each device."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that imports, and then waits."""

    process: subprocess.Popen[bytes]
    program: list[str]
    """The command without its arguments."""
    rank: int
    folder: str
    pipe: int


_waiting: list[Child] = []


@contextlib.contextmanager
def started(config: TrainerConfig, folder: str) -> Iterator[None]:
    """Start processes for all devices but the first in ``folder``; those that nobody has asked for by the end are
    ended."""
    if isinstance(config.devices, int) and config.strategy in STRATEGIES:
        with contextlib.suppress(OSError):  # Lightning meets the same one, and says so
            _waiting.extend(_start(rank, folder) for rank in range(1, config.devices))
    try:
        yield
    finally:
        end()


def _start(rank: int, folder: str) -> Child:
    spec = sys.modules["__main__"].__spec__
    program = [sys.executable, *([os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name])]
    read, write = os.pipe()
    try:
        environment = {**os.environ, "LOCAL_RANK": str(rank), PIPE: str(read)}
        process = subprocess.Popen([*program, *sys.argv[1:]], env=environment, cwd=folder, pass_fds=(read,))
    except OSError:
        os.close(write)
        raise
    finally:
        os.close(read)
    return Child(process, program, rank, folder, write)


def process_for(command: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """As ``subprocess.Popen``: one that waits and is like what is asked for, or a new one."""
    for child in _waiting:
        length = len(child.program)
        alike = list(command[:length]) == child.program and env.get("LOCAL_RANK") == str(child.rank)
        if child.process.poll() is None and alike and cwd == child.folder:
            _waiting.remove(child)
            try:
                with open(child.pipe, "wb") as pipe:
                    pipe.write(json.dumps({"arguments": command[length:], "environment": dict(env)}).encode())
            except OSError:  # it has just died
                child.process.wait()
                break
            return child.process
    return subprocess.Popen(command, env=env, cwd=cwd)


def end() -> None:
    """End the processes that still wait."""
    while _waiting:
        child = _waiting.pop()
        child.process.kill()
        child.process.wait()
        os.close(child.pipe)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """For the imports of a process that was started early: then wait, and take over arguments and environment. What the
    first process has set since then, it has set after the same imports.

    Ends the process where the one that started it has ended, or does not need it.
    """
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a whole terminal: the first process decides
    signal_at_end_of_parent(signal.SIGKILL)
    with open(int(os.environ[PIPE]), "rb") as stream:
        yield
        message = stream.read()
    if not message:
        os._exit(0)
    order = json.loads(message)
    sys.argv[1:] = order["arguments"]
    os.environ.clear()
    os.environ.update(order["environment"])
    signal.signal(signal.SIGINT, interrupted)
