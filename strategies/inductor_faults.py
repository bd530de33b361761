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

    Both are those of torch 2.11, on a GPU, with a sum for a symbolic size: a language model that reads all tokens but
    the last, as one graph for all lengths.
    """
    if "torch._inductor.scheduler" not in sys.modules or TorchVersion(torch.__version__) >= "2.12":
        yield
        return
    with _reductions_over_sums_kept_apart(), _sizes_compared_by_value():
        yield


@contextlib.contextmanager
def _reductions_over_sums_kept_apart() -> Iterator[None]:
    """The two reductions of a layer norm's backward become one kernel, whose partial sums lie at a size times another,
    written as text: with ``2*s - 2`` it says ``0 * (-2) + 2*s * 768``. The step fails with "shape '[512, 768]' is
    invalid for input of size 0". Reductions with a sum for a size stay two kernels here.

    Fixed in 2.12: https://github.com/pytorch/pytorch/pull/176008, https://github.com/pytorch/pytorch/pull/176483
    """
    fusing: Any = sys.modules["torch._inductor.scheduler"].MixOrderReduction
    before = vars(fusing)["can_fuse"]

    def can_fuse(cls: Any, node1: Any, node2: Any) -> bool:
        fused: bool = before.__func__(cls, node1, node2)
        return fused and not any(size.expand().is_Add for size in cls.get_numel_rnumel(node1))

    with _replaced(fusing, "can_fuse", classmethod(can_fuse)):
        yield


@contextlib.contextmanager
def _sizes_compared_by_value() -> Iterator[None]:
    """Where the batch is symbolic too, ``b*(s - 1)`` and ``b*s - b`` are taken for two sizes, and the compile ends in
    an AssertionError without a message. They are compared by value here.

    Fixed in 2.12: https://github.com/pytorch/pytorch/pull/181793
    """
    import torch._inductor.tiling_utils as tiling
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    before = tiling.get_pw_red_splits

    def get_pw_red_splits(n: Any, pointwise_numel: Any, *others: Any, **options: Any) -> Any:
        size = sympy_product(n._body.sizes[0])
        if V.graph.sizevars.statically_known_equals(size, pointwise_numel):
            pointwise_numel = size
        return before(n, pointwise_numel, *others, **options)

    with _replaced(tiling, "get_pw_red_splits", get_pw_red_splits):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
