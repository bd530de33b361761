"""Padding: how batches of ragged length are grouped and padded, as a strategy of the SHAPES stage decides it.

A batch's *length* is the number of positions that the model computes with: the longest declared tensor of the batch
along its ragged dimension, less its ``extra``. An *edge* is a length that batches are padded up to; all declared
tensors of a batch are padded to one edge. Rows (examples) of a batch lie in dimension 0 of its tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strategies.base import Ragged


@dataclass(kw_only=True, slots=True)
class Padding:
    """Filled in by the strategy; the trainer rebuilds the loaders by it and fills in what only the data can tell."""

    name: str
    """Name of the strategy, for messages and for its part of ``Program.report``."""
    ragged: tuple[Ragged, ...]
    """The batch's tensors that are padded."""
    multiple: int = 1
    """Every edge is a multiple of this; so is what a batch longer than the last edge is padded to."""
    choose_edges: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    """Lengths of the training examples to ascending edges; None: batches keep their composition and order, and are
    only padded up to ``multiple``."""
    limit: int | None = None
    """Most positions that the model takes: nothing is padded beyond it, be it a multiple or not."""
    tokens_per_batch: int | None = None
    """Positions a training batch, padding included: shorter buckets have more rows; None: the loader's own rows."""
    warm: bool = False
    """Whether every shape should be compiled before the first step."""
    on_recompile: str = "warn"
    """``fail`` or ``warn``: what a shape that compiles after that should do."""
    edges: tuple[int, ...] = ()
    """Ascending; filled in when the loaders are built (before the first batch), empty without ``choose_edges``."""
    batch_sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rows of the training batches on this process by edge that occurs, most first; filled in like ``edges``."""
    validation_batch_sizes: tuple[int, ...] = ()
    """Rows of the validation batches that occur on this process, most first (the last one may be smaller); empty
    without validation; filled in when the validation loader is built."""
    observe: Callable[[Any], None] | None = None
    """Called with every batch once it is on its device, before the module sees it; None: nobody wants to know."""
    seen: Callable[[], dict[str, Any]] | None = None
    """Figures of the batches that were really handed out, for the report; filled in like ``edges``."""

    def length(self, batch: Any) -> int:
        """Positions that the model computes with for ``batch``. Raises ValueError when a declared tensor is missing."""
        return length_of(batch, self.ragged)

    def rows(self, batch: Any) -> int:
        """Examples in ``batch``."""
        return tensor_of(batch, self.ragged[0]).shape[0]

    def edge_of(self, length: int) -> int:
        """The edge that a batch of ``length`` is padded up to; beyond the last one, the next multiple."""
        return edge_of(length, self.edges, self.multiple, self.limit)

    def to_edge(self, batch: Any, edge: int) -> Any:
        """A copy of ``batch`` whose declared tensors are padded or cut to ``edge`` positions (and their extra)."""
        return to_edge(batch, self.ragged, edge)

    def resized(self, batch: Any, rows: int, edge: int) -> Any:
        """A copy of ``batch`` with ``rows`` examples (repeated or left out) of ``edge`` positions.

        Every tensor with as many entries in dimension 0 as the batch has examples is resized; everything else, numbers
        included, stays as it is.
        """
        before = self.rows(batch)
        return self.to_edge(batch if rows == before else _resize(batch, before, rows), edge)


def edge_of(length: int, edges: Sequence[int], multiple: int, limit: int | None = None) -> int:
    """The first of ``edges`` that is at least ``length``; beyond the last one, the next multiple."""
    place = bisect_left(edges, length)
    if place < len(edges):
        return edges[place]
    beyond = math.ceil(length / multiple) * multiple
    return beyond if limit is None else max(length, min(beyond, limit))


def length_of(batch: Any, ragged: Sequence[Ragged]) -> int:
    """Length of the longest declared tensor, less its extra. Raises ValueError when one is missing."""
    return max(tensor_of(batch, entry).shape[entry.dim] - entry.extra for entry in ragged)


def to_edge(batch: Any, ragged: Sequence[Ragged], edge: int) -> Any:
    """A copy of ``batch`` whose declared tensors are padded or cut to ``edge`` positions and their extra."""
    changed: dict[str, Tensor] = {}
    for entry in ragged:
        tensor = tensor_of(batch, entry)
        width, dim = edge + entry.extra, entry.dim % tensor.ndim
        have = tensor.shape[dim]
        if have == width:
            continue
        if have > width:
            # Contiguous as a batch of this width would be: strides are part of what a compiler guards.
            changed[entry.field] = tensor.narrow(dim, 0, width).contiguous()
        else:
            shape = [*tensor.shape[:dim], width, *tensor.shape[dim + 1 :]]
            padded = tensor.new_full(shape, entry.pad if tensor.is_floating_point() else int(entry.pad))
            padded.narrow(dim, 0, have).copy_(tensor)
            changed[entry.field] = padded
    return _replaced(batch, changed) if changed else batch


def tensor_of(batch: Any, entry: Ragged) -> Tensor:
    """The declared tensor of ``batch``. Raises ValueError, naming what there is, when it is missing or not ragged."""
    value: Any = None
    if isinstance(batch, Mapping):
        value, names = batch.get(entry.field), list(batch)
    elif hasattr(batch, entry.field):
        value, names = getattr(batch, entry.field), []
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        names = [str(index) for index in range(len(batch))]
        value = batch[int(entry.field)] if entry.field in names else None
    else:
        names = sorted(name for name in getattr(batch, "__dict__", {}) if not name.startswith("_"))
    if value is None:
        raise ValueError(f"ragged: the batch ({type(batch).__name__}) has no {entry.field!r}; it has {names}")
    if not isinstance(value, Tensor) or not -value.ndim <= entry.dim < value.ndim or entry.dim % value.ndim == 0:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"ragged: {entry.field!r} of the batch must be a tensor whose dimension {entry.dim} holds positions and "
            f"whose dimension 0 holds examples; it is {shape}"
        )
    return value


def _replaced(batch: Any, changed: Mapping[str, Tensor]) -> Any:
    """A shallow copy of ``batch`` with other tensors."""
    if isinstance(batch, Mapping):
        copied: Any = copy.copy(batch)  # a BatchEncoding stays one
        for name, value in changed.items():
            copied[name] = value
        return copied
    if hasattr(batch, "_replace"):
        names = {name if name in batch._fields else batch._fields[int(name)]: name for name in changed}
        return batch._replace(**{target: changed[name] for target, name in names.items()})
    if isinstance(batch, list | tuple):
        return type(batch)([changed.get(str(index), value) for index, value in enumerate(batch)])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **changed)
    copied = copy.copy(batch)
    for name, value in changed.items():
        setattr(copied, name, value)
    return copied


def _resize(value: Any, before: int, rows: int) -> Any:
    """Repeat or leave out rows of every tensor in ``value`` that has ``before`` of them."""
    if isinstance(value, Tensor):
        if value.ndim == 0 or value.shape[0] != before:
            return value
        index = torch.arange(rows, device=value.device) % before
        return value.index_select(0, index)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for name in list(value):
            copied[name] = _resize(value[name], before, rows)
        return copied
    if hasattr(value, "_fields"):
        return type(value)(*(_resize(item, before, rows) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([_resize(item, before, rows) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _resize(getattr(value, name), before, rows) for name in names})
    if hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not callable(value):
        copied = copy.copy(value)
        for name, item in vars(value).items():
            setattr(copied, name, _resize(item, before, rows))
        return copied
    return value
