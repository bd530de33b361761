"""Get Inductor ready in the background while data and model are being built.

A cold compile otherwise begins by importing Inductor and starting its pool of compile workers, several seconds in
which the device waits. (On torch 2.11 a CPU run first probes the vector instructions, which takes longer still.)
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

LONGEST_SECONDS = 120.0
"""A head start that takes longer than this is none; the run goes on without it."""
INDUCTOR = "torch._inductor.compile_fx"
COMPILERS = ("cc1plus", "clang", "clang++", "cicc", "ptxas")
"""Programs that translate. No linker: a cache would take the half library that a killed one leaves for a whole one."""


class Preparation:
    """One background thread, waited for in two parts by the thread that started it."""

    def __init__(self) -> None:
        self._waited_seconds = 0.0
        self._thread_seconds = 0.0
        self._idle_seconds: float | None = None
        self._began, self._began_working = time.perf_counter(), time.thread_time()
        self._imported = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="prepare-inductor", daemon=True)
        self._thread.start()

    @property
    def cost_seconds(self) -> float:
        """What the head start cost the run so far; never more than went by until it was waited for.

        The larger of what was waited for and of the background thread's processor seconds, which Python's lock takes
        from the main thread while both want it. Of these no more than the main thread did not work meanwhile: a core
        that drew weights in C++ lost nothing. Still an upper bound, where it was waiting for something else.
        """
        taken = min(self._thread_seconds, self._idle_seconds or 0.0)
        return max(self._waited_seconds, taken)

    def wait_for_imports(self) -> None:
        """Block until Inductor is imported, so that no two threads import it at once; before strategies apply."""
        began = time.perf_counter()
        self._imported.wait()
        self._waited_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Block until everything is ready; before the first compile, and before any process is forked: a data loader's
        worker would inherit the pipe to a compiler that is being probed, and the thread would never see its end."""
        began = time.perf_counter()
        self._thread.join(LONGEST_SECONDS)
        now = time.perf_counter()
        self._waited_seconds += now - began
        if self._idle_seconds is None:  # what the main thread does later has nothing to do with it
            self._idle_seconds = (now - self._began) - (time.thread_time() - self._began_working)

    def _prepare(self) -> None:
        began = time.thread_time()
        try:
            with contextlib.suppress(Exception):  # whatever is wrong comes up again, with its reason, when it compiles
                importlib.import_module(INDUCTOR)
        finally:
            self._imported.set()
        _warm_up()
        self._thread_seconds = time.thread_time() - began


def is_prepared() -> bool:
    """Whether Inductor has been imported, by whomever."""
    return INDUCTOR in sys.modules


def stop_compiling() -> None:
    """End what Inductor compiles beside the main thread: its worker processes and compilers are killed, what is queued
    is dropped. Python would otherwise wait for all of it when it exits. A later compile starts workers anew."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if not hasattr(inductor, "AsyncCompile"):  # or another thread is in the middle of importing it
        return
    if inductor.AsyncCompile.pool.cache_info().currsize:  # threads, each of which waits for a compiler
        inductor.AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        inductor.AsyncCompile.pool.cache_clear()
    ours = {pid for pid, name in descendants(os.getpid()).items() if name in COMPILERS}
    for pool in inductor._pool_set:
        if isinstance(pool, Executor):
            pool.shutdown(wait=False, cancel_futures=True)
        else:
            pool.running = False  # else it waits for the jobs, or reports that they are gone
            ours |= {pool.process.pid, *descendants(pool.process.pid)}
    for pid in ours:
        with contextlib.suppress(OSError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)
    inductor.shutdown_compile_workers()  # forgets them


def descendants(pid: int) -> dict[int, str]:
    """Processes that ``pid`` has started, and those that they have, with their names; empty without Linux's /proc."""
    parents: dict[int, tuple[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = stat.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            parents[int(number)] = int(fields.split()[1]), name
    found: dict[int, str] = {}
    above = {pid}
    while above:
        above = {child for child, (parent, _) in parents.items() if parent in above}
        found |= {child: parents[child][1] for child in above}
    return found


def _warm_up() -> None:
    with contextlib.suppress(Exception):  # as above
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import torch_key
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

        torch_key()  # a hash over torch's own files, part of every key of the cache
        torch.compiler.list_backends(())
        if HAS_TRITON:
            triton_key()  # a hash over Triton's files, part of every key, those of code for a CPU, too
        if torch.cuda.is_available():
            AsyncCompile.wakeup()
        else:
            pick_vec_isa()


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, ``values`` are in the process's environment; afterwards it holds what it held of them before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
