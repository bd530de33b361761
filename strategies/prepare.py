"""Get Inductor ready in the background while data and model are being built.

A cold compile otherwise begins by importing Inductor and starting its pool of compile workers, several seconds in
which the device waits (on torch 2.11 a CPU run first probes the vector instructions, which takes longer still).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time

import torch

LONGEST_SECONDS = 120.0
"""A head start that takes longer than this is none; the run goes on without it."""


class Preparation:
    """One background thread, waited for in two parts."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        """What the head start did not cover: so long somebody was blocked."""
        self._imported = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="prepare-inductor", daemon=True)
        self._thread.start()

    def wait_for_imports(self) -> None:
        """Block until Inductor is imported, so that no two threads import it at once; before strategies apply."""
        began = time.perf_counter()
        self._imported.wait()
        self.waited_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Block until everything is ready; before the first compile, and before any process is forked: a data loader's
        worker would inherit the pipe to a compiler that is being probed, and the thread would never see its end."""
        began = time.perf_counter()
        self._thread.join(LONGEST_SECONDS)
        self.waited_seconds += time.perf_counter() - began

    def _prepare(self) -> None:
        try:
            _import_inductor()
        finally:
            self._imported.set()
        _warm_up()


def _import_inductor() -> None:
    with contextlib.suppress(Exception):  # whatever is wrong comes up again, with its reason, at the first compile
        importlib.import_module("torch._inductor.compile_fx")


def _warm_up() -> None:
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        if torch.cuda.is_available():
            AsyncCompile.wakeup()
        else:
            pick_vec_isa()
    except Exception:
        # Only a head start: whatever is wrong here comes up again, with its reason, at the first compile.
        return
