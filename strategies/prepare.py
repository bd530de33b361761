"""Get Inductor ready in the background while data and model are being built.

A cold compile otherwise begins by importing Inductor and starting its pool of compile workers, several seconds in
which the device waits (on torch 2.11 a CPU run first probes the vector instructions, which takes longer still).
"""

from __future__ import annotations

import threading


class Preparation:
    """One background thread; ``wait`` before the first compile, so that no two threads import Inductor at once."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=_prepare, name="prepare-inductor", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until Inductor is imported and its workers are on their way."""
        self._thread.join()


def _prepare() -> None:
    try:
        import torch._inductor.compile_fx
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        if torch.cuda.is_available():
            AsyncCompile.wakeup()
        else:
            pick_vec_isa()
    except Exception:
        # Only a head start: whatever is wrong here comes up again, with its reason, at the first compile.
        return
