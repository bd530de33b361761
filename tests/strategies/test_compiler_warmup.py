"""The head start for Inductor: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch._inductor.cpu_vec_isa

from strategies import compiler_warmup
from strategies.compiler_warmup import Preparation, descendants, stop_compiling


def test_waiting_means_that_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", probed.set)
    preparation = Preparation()
    preparation.wait()
    assert probed.is_set()
    assert preparation.cost_seconds >= 0


def preparation(patch: pytest.MonkeyPatch, *, clock: Sequence[float], main: Sequence[float], own: float) -> Preparation:
    """One that has nothing to do.

    ``clock`` is what the clock says: it begins, then for each wait when that begins and ends. ``main`` are the main
    thread's processor seconds, at the start and once all is waited for; ``own`` the background thread's.
    """
    thread, working, background = threading.current_thread(), iter(main), iter((0.0, own))
    patch.setattr(compiler_warmup, "INDUCTOR", "time")
    patch.setattr(compiler_warmup, "_warm_up", lambda: None)
    times = {
        "perf_counter": iter(clock).__next__,
        "thread_time": lambda: next(working if threading.current_thread() is thread else background),
    }
    patch.setattr(compiler_warmup, "time", SimpleNamespace(**times))
    return Preparation()


def test_what_was_waited_for_is_counted_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = preparation(monkeypatch, clock=(0, 1, 3, 4, 4.5, 9, 9), main=(0, 0), own=0)
    costs = []
    for wait in (made.wait_for_imports, made.wait, made.wait):
        wait()
        costs.append(made.cost_seconds)
    assert costs == [2, 2.5, 2.5]


@pytest.mark.parametrize(
    ("worked", "cost"),
    [
        (2, 3.5),  # it ran beside 2 s of the main thread's own, and took the lock for the rest
        (5, 0.5),  # the main thread lost nothing but the wait
        (0, 4),  # never more than it worked
    ],
)
def test_what_it_took_from_a_main_thread_that_did_not_wait_is_counted(
    worked: float, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = preparation(monkeypatch, clock=(0, 5, 5.5, 100, 100), main=(0, worked), own=4)
    made.wait()
    assert made.cost_seconds == cost
    made.wait()
    assert made.cost_seconds == cost, "what the main thread does later has nothing to do with it"


def test_an_error_in_the_background_is_left_to_the_first_compile(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", fail)
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    Preparation().wait()
    assert raised == []
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_compiles_beside_a_run_that_stops_is_not_waited_for(tmp_path: Path) -> None:
    from torch._inductor.async_compile import AsyncCompile

    sleep = shutil.which("sleep")
    assert sleep is not None
    running = {name: shutil.copy(sleep, tmp_path / name) for name in ("cc1plus", "ld")}
    compiler, linker = (subprocess.Popen([program, "600"]) for program in running.values())
    workers, threads = AsyncCompile.process_pool(), AsyncCompile.pool()
    jobs = [workers.submit(time.sleep, 600), *(threads.submit(time.sleep, 0.5) for _ in range(1000))]
    sidecar: int = workers.process.pid  # type: ignore[union-attr]
    deadline = time.monotonic() + 100
    while not (below := descendants(sidecar)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert below, "the sidecar has workers of its own"
    stop_compiling()
    assert compiler.wait(200) < 0, "by a signal, long before its time"
    assert linker.poll() is None, "half a library would be left"
    linker.kill()
    linker.wait()
    assert workers.process.wait(200) < 0  # type: ignore[union-attr]
    assert all(_ended(pid) for pid in below)
    assert all(job.done() for job in jobs[-40:]), "what was queued is dropped"
    assert AsyncCompile.process_pool() is not workers, "a later compile starts its own"
    stop_compiling()


def test_a_run_stops_while_another_thread_is_in_the_middle_of_importing_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._inductor.async_compile"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    stop_compiling()


def _ended(pid: int) -> bool:
    until = time.monotonic() + 100
    while time.monotonic() < until:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2].startswith("Z"):
                return True
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.05)
    return False
