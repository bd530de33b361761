"""Faults of Inductor in some version of torch, kept away from runs until that version is no longer supported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.torch_version import TorchVersion


@contextlib.contextmanager
def faults_avoided() -> Iterator[None]:
    """Until the block ends; where Inductor is not imported yet, there is nothing to do.

    Torch 2.11 fuses the two reductions of a layer norm's backward into one kernel on a GPU, and writes where its
    partial sums lie as text, a size times another: with ``2*s - 2`` splits ``0 * (-2) + 2*s * 768``. The step fails
    with "shape '[512, 768]' is invalid for input of size 0". Such sizes are those of a language model that reads all
    tokens but the last, as one graph with symbolic lengths. Reductions with a sum for a size stay two kernels here.
    Fixed in 2.12: https://github.com/pytorch/pytorch/pull/176008, https://github.com/pytorch/pytorch/pull/176483
    """
    scheduler: Any = sys.modules.get("torch._inductor.scheduler")
    if scheduler is None or TorchVersion(torch.__version__) >= "2.12":
        yield
        return
    fusing = scheduler.MixOrderReduction
    before = vars(fusing)["can_fuse"]

    def can_fuse(cls: Any, node1: Any, node2: Any) -> bool:
        fused: bool = before.__func__(cls, node1, node2)
        return fused and not any(size.expand().is_Add for size in cls.get_numel_rnumel(node1))

    fusing.can_fuse = classmethod(can_fuse)
    try:
        yield
    finally:
        fusing.can_fuse = before
