"""A pair of CPU processes that tests share: ``pair(function, *arguments)`` calls ``function`` on two ranks.

All pairs are forks of one process that has imported torch, Lightning and this project once in a session. So a call
starts within tenths of a second, and what it changes (patches, compiled code, process groups) ends with it. Each rank
finds the environment that ``torchrun`` gives: ``L.Trainer(accelerator="cpu", devices=2, strategy="ddp")`` just works.

    pytestmark = pytest.mark.xdist_group("two_processes")  # these files run on one worker, which imports once

    def rank() -> int:  # at a module's top level
        return int(os.environ["RANK"])

    def test_ranks(pair: Pair) -> None:
        assert pair(rank) == [0, 1]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])
SECONDS_AFTER_A_FAILURE = 30.0
"""How long a rank may go on once the other one has failed."""
STACK = "(most recent call first)"
"""In what faulthandler prints."""

PORTS = itertools.count()
Pair = Callable[..., list[Any]]
"""``on_ranks``, as the fixture ``pair`` gives it."""
Ended = subprocess.CompletedProcess[str]
Answers = dict[int, tuple[bool, Any]]
"""By rank: whether the call returned, and what; or its traceback. A rank that died has none."""


class RanksFailed(AssertionError):
    """Not all ranks returned; with what is known of each."""


def python(*arguments: str | Path, cwd: Path = ROOT, path: Sequence[Path] = (ROOT,), **environment: str) -> Ended:
    """A Python of its own that was given ``arguments`` and has ended; it finds packages in ``path``."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=280, check=False)


def on_ranks(
    function: Callable[..., Any] | str,
    *arguments: Any,
    timeout_seconds: float = 500.0,
    environment: Mapping[str, str] | None = None,
    ranks: int = 2,
) -> list[Any]:
    """What ``function(*arguments)`` returns on each rank; function, arguments and results are pickled.

    ``function`` is one of a module's top level, or ``"module:function"``; ``environment`` is added to torchrun's.
    Raises ``RanksFailed`` where a rank raises (its traceback), dies, or is not done in time (its stack).
    """
    shared = {**os.environ, **torchrun(ranks), **(environment or {})}
    group, connections = [], []
    with contextlib.chdir(ROOT):  # from where the server imports what is preloaded
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                ours, theirs = FORKS.Pipe()
                connections.append(ours)
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = FORKS.Process(target=be_rank, args=(folder, own, theirs))
                process.start()
                group.append(process)
                theirs.close()
                ours.send((function, arguments))
            said = answers(connections, timeout_seconds)
            if all(rank in said and said[rank][0] for rank in range(ranks)):
                return [said[rank][1] for rank in range(ranks)]
            for rank, process in enumerate(group):
                if rank not in said and process.is_alive():
                    with contextlib.suppress(ProcessLookupError):  # it has died since
                        os.kill(process.pid or 0, signal.SIGUSR1)  # prints its stack
                    end = time.monotonic() + SECONDS_AFTER_A_FAILURE
                    while STACK not in output(folder, rank) and process.is_alive() and time.monotonic() < end:
                        time.sleep(0.05)
            raise RanksFailed("\n".join(known(folder, rank, said.get(rank)) for rank in range(ranks)))
        finally:
            for process in group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)  # with what it has started
                process.join(10)
            for connection in connections:
                connection.close()


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """A process of that server that has begun with ``function(*arguments)``, and is no rank."""
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    return process


def torchrun(ranks: int) -> dict[str, str]:
    """What ``torchrun`` puts into the environment of all ranks of one host; at a free port."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """One that is free, and that no connection gets by chance until it is used: the system draws theirs from 32768 on.
    Processes of one machine begin to look at different ones."""
    for _ in range(10_000):
        port = 10_000 + (os.getpid() * 101 + next(PORTS)) % 20_000
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def answers(connections: list[Any], seconds: float, left: float = SECONDS_AFTER_A_FAILURE) -> Answers:
    """The answers that come in time; less time is ``left`` once a rank has failed."""
    said: Answers = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    end = time.monotonic() + seconds
    while waiting and (rest := end - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=rest):
            rank = waiting.pop(connection)
            with contextlib.suppress(EOFError, ConnectionResetError):
                said[rank] = connection.recv()  # type: ignore[union-attr]
            if rank not in said or not said[rank][0]:
                end = min(end, time.monotonic() + left)
    return said


def known(folder: str, rank: int, said: tuple[bool, Any] | None) -> str:
    """What is known of one rank after a failed call."""
    if said is not None:
        return f"rank {rank} " + ("returned" if said[0] else f"raised\n{said[1]}")
    return f"rank {rank} died, or was not done in time:\n{output(folder, rank)[-6000:]}"


def output(folder: str, rank: int) -> str:
    """What one rank has printed; nothing where it has not begun."""
    with contextlib.suppress(FileNotFoundError):
        return (Path(folder) / f"{rank}.output").read_text(errors="replace")
    return ""


def be_rank(folder: str, environment: dict[str, str], connection: Connection) -> None:
    """Be one rank: call the function, answer, and stay until all have answered, because its end would break others."""
    multiprocessing.set_start_method("fork", force=True)  # for data workers, which would import everything anew
    gc.freeze()  # each full collection would look through, and copy, half a million objects of the process forked from
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    with open(os.path.join(folder, f"{environment['RANK']}.output"), "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1)
    try:
        function, arguments = connection.recv()
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        prepare(int(environment["RANK"]))
        connection.send((True, function(*arguments)))
        connection.recv()
    except EOFError:  # the test has ended
        pass
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # a group in which a step was broken off is not taken down in order


def command_alone(arguments: Sequence[str], folder: Path, output: Path) -> int:
    """Be ``python -m trainer`` in ``folder`` on one rank that is none; its exit code. It prints to ``output``."""
    for name in ("RANK", "LOCAL_RANK", *torchrun(1)):
        del os.environ[name]
    return command_on_a_rank(arguments, folder, output)


def command_on_a_rank(arguments: Sequence[str], folder: Path, output: Path) -> int:
    """The same on a rank of a training that is launched from outside."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["trainer", *arguments]
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
    from trainer.cli import main

    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def compile_quickly() -> None:
    """Leave out what costs Dynamo more than a third of a small compile, and no test looks at: a log of how long new
    guards take, for which it flushes the processor's caches, asking for CUDA devices where there are none, and the
    trace of each compile, every graph as text and JSON. torch writes that as soon as its logger has a handler, and
    pytest adds its own to each logger that does not propagate: https://github.com/pytest-dev/pytest/pull/14375"""
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards).update(profile_guard_manager=lambda *_: 0.0)
        cuda = sys.modules["torch.cuda"]
        if not cuda.is_available():
            vars(cuda).update(_cached_device_count=0)
    if "torch" in sys.modules:
        logging.getLogger("torch.__trace").propagate = True


def prepare(rank: int) -> None:
    """Set what has been imported without a rank, and what a test should find alike on all."""
    import lightning as L
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # Lightning asks the environment for it when it is imported
    compile_quickly()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
