"""Get Inductor ready in the background while data and model are being built.

A cold compile otherwise begins by importing Inductor and starting its pool of compile workers, several seconds in
which the device waits (on torch 2.11 a CPU run first probes the vector instructions, which takes longer still).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time

import torch

LONGEST_SECONDS = 120.0
"""A head start that takes longer than this is none; the run goes on without it."""
INDUCTOR = "torch._inductor.compile_fx"


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
            _import_inductor()
        finally:
            self._imported.set()
        _warm_up()
        self._thread_seconds = time.thread_time() - began


def is_prepared() -> bool:
    """Whether Inductor has been imported, by whomever."""
    return INDUCTOR in sys.modules


def _import_inductor() -> None:
    with contextlib.suppress(Exception):  # whatever is wrong comes up again, with its reason, at the first compile
        importlib.import_module(INDUCTOR)


def _warm_up() -> None:
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.runtime.triton_compat import triton_key

        if torch.cuda.is_available():
            AsyncCompile.wakeup()
            triton_key()  # a hash over Triton's files, part of every key of the cache
        else:
            pick_vec_isa()
    except Exception:
        # Only a head start: whatever is wrong here comes up again, with its reason, at the first compile.
        return
