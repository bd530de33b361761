"""Dynamic marks: tell Dynamo, before each compiled region runs, which dimensions follow the length of the batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.base import Ragged
from strategies.padding import length_of, tensor_of


class Marks:
    """Marks the batch's ragged tensors, and every input of a region that is as long as the batch.

    A region deep in the network is handed tensors that the module made, to which no mark on the batch carries over.
    Which of their dimensions are positions is told by size, and no longer of one that kept its size when the length
    changed: a width may happen to be as large as a batch is long. ``maybe_mark_dynamic`` is used and not
    ``mark_dynamic``: that one raises ConstraintViolationError where such a dimension turns out to be a constant.
    """

    def __init__(self, ragged: Sequence[Ragged]) -> None:
        self._ragged = tuple(ragged)
        self._length = 0
        self._sizes: set[int] = set()

    def observe(self, batch: Any) -> None:
        """A batch is about to be used: mark its ragged tensors and remember its length."""
        self._length = length = length_of(batch, self._ragged)
        self._sizes = {length, *(length + entry.extra for entry in self._ragged)}
        for entry in self._ragged:
            _mark(tensor_of(batch, entry), entry.dim)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with its tensors marked first."""
        last: dict[tuple[object, int], tuple[int, int]] = {}
        fixed: set[tuple[object, int]] = set()

        @functools.wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # part of a larger region, whose own inputs are marked
                return call(*args, **kwargs)
            for name, value in itertools.chain(enumerate(args), kwargs.items()):
                if isinstance(value, Tensor):
                    for dim, size in enumerate(value.shape[1:], start=1):
                        key = (name, dim)
                        before, length = last.get(key, (-1, self._length))
                        if size == before and length != self._length:
                            fixed.add(key)
                        last[key] = size, self._length
                        if size in self._sizes and key not in fixed:
                            _mark(value, dim)
            return call(*args, **kwargs)

        return marked


def _mark(tensor: Tensor, dim: int) -> None:
    # A size of 0 or 1 is a constant to Dynamo whatever is marked.
    if tensor.shape[dim] > 1:
        # https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
