"""The head start for Inductor: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch._inductor.cpu_vec_isa

from strategies import prepare
from strategies.prepare import Preparation, descendants, stop_compiling


def test_waiting_means_that_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", probed.set)
    preparation = Preparation()
    preparation.wait()
    assert probed.is_set()
    assert preparation.cost_seconds >= 0


def test_what_was_waited_for_is_counted_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_import_inductor", lambda: time.sleep(0.2))
    monkeypatch.setattr(prepare, "_warm_up", lambda: time.sleep(0.2))
    preparation = Preparation()
    preparation.wait_for_imports()
    after_imports = preparation.cost_seconds
    preparation.wait()
    assert 0.1 < after_imports < preparation.cost_seconds
    known = preparation.cost_seconds
    preparation.wait()
    assert preparation.cost_seconds - known < 0.1, "it is over"


def _work() -> None:
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass


def test_what_it_took_from_a_main_thread_that_did_not_wait_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_import_inductor", _work)
    monkeypatch.setattr(prepare, "_warm_up", lambda: None)
    began = time.perf_counter()
    preparation = Preparation()
    while preparation._thread.is_alive():  # runs Python, of which one thread does so at a time
        pass
    preparation.wait()
    elapsed = time.perf_counter() - began
    assert 0.15 < preparation.cost_seconds <= elapsed
    time.sleep(0.1)
    known = preparation.cost_seconds
    preparation.wait()
    assert preparation.cost_seconds == known, "what the main thread does later has nothing to do with it"


def test_a_main_thread_that_worked_all_the_time_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    working = iter((0.0, 5.0))  # the main thread's processor seconds, when it starts the thread and when it waits
    monkeypatch.setattr(prepare, "_import_inductor", lambda: None)
    monkeypatch.setattr(prepare, "_warm_up", lambda: None)
    main = threading.current_thread()
    background = iter((0.0, 4.0))
    monkeypatch.setattr(
        prepare,
        "time",
        SimpleNamespace(
            perf_counter=iter((0.0, 5.5, 5.5)).__next__,  # began; began to wait, waited
            thread_time=lambda: next(working if threading.current_thread() is main else background),
        ),
    )
    preparation = Preparation()
    preparation.wait()
    assert preparation.cost_seconds == pytest.approx(0.5), "of 4 s, as the main thread was busy in the others"


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
    compiler, linker = (subprocess.Popen([program, "60"]) for program in running.values())
    workers, threads = AsyncCompile.process_pool(), AsyncCompile.pool()
    jobs = [workers.submit(time.sleep, 60), *(threads.submit(time.sleep, 0.5) for _ in range(1000))]
    sidecar: int = workers.process.pid  # type: ignore[union-attr]
    deadline = time.monotonic() + 100
    while not (below := descendants(sidecar)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert below, "the sidecar has workers of its own"
    began = time.monotonic()
    stop_compiling()
    assert compiler.wait(10) < 0
    assert linker.poll() is None, "half a library would be left"
    linker.kill()
    linker.wait()
    assert workers.process.wait(10) < 0  # type: ignore[union-attr]
    assert all(_ended(pid) for pid in below)
    assert time.monotonic() - began < 10
    assert all(job.done() for job in jobs[-40:]), "what was queued is dropped"
    assert AsyncCompile.process_pool() is not workers, "a later compile starts its own"
    stop_compiling()


def _ended(pid: int) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2].startswith("Z"):
                return True
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.05)
    return False
