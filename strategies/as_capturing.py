"""As capturing: code that asks whether it is being captured gets, before the capture, the answer it will get within.

Libraries take another path in a capture. Transformers then builds the attention masks that it leaves out otherwise,
because leaving one out takes reading a tensor on the host (``transformers.masking_utils``). The run before a capture
has to take the capture's path: else the capture is the first to hand a compiled region a mask, and has to compile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_graphs: Any = torch.cuda.graphs
_asked: Callable[[], bool] = _graphs._cuda_isCurrentStreamCapturing
"""What ``torch.cuda.is_current_stream_capturing`` calls by this name, however the caller imported that function."""


@contextlib.contextmanager
def as_capturing(answer: bool = True) -> Iterator[None]:
    """Inside, ``torch.cuda.is_current_stream_capturing()`` is True but to torch and us; else it tells the truth."""
    before = _graphs._cuda_isCurrentStreamCapturing
    _graphs._cuda_isCurrentStreamCapturing = _capturing if answer else _asked
    try:
        yield
    finally:
        _graphs._cuda_isCurrentStreamCapturing = before


def _capturing() -> bool:
    # Torch itself gets the truth: Dynamo compiles in no capture (2.15), and optimizers refuse to step in one. So do our
    # own packages: a compiled optimizer leaves the host's part of a step, counting it, out of a capture alone.
    asker = sys._getframe(2).f_globals.get("__name__", "")
    return _asked() if asker.startswith(("torch.", "strategies.", "trainer.")) else True
