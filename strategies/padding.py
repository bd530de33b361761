"""Padding: how batches of ragged length are grouped and padded, as a strategy of the SHAPES stage decides it.

A batch's *length* is the number of positions that the model computes with: the longest declared tensor of the batch
along its ragged dimension, less its ``extra``. An *edge* is a length that batches are padded up to; all declared
tensors of a batch are padded to one edge. Rows (examples) of a batch lie in dimension 0 of its tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from strategies.base import Ragged


def require_ragged(ragged: Sequence[Ragged], name: str, instead: str = "") -> None:
    """Raise ValueError, ending with ``instead``, where strategy ``name`` has no ragged tensor to work on."""
    if not ragged:
        raise ValueError(
            f"compile.{name}: no tensor of the batch is declared ragged (packed rows are not); a task names them in "
            "Declaration(ragged=...), a Lightning project in Compile(ragged=[('tokens', 1)]): field of the batch "
            f"and dimension that holds positions{instead}"
        )


def table_sizes(module: nn.Module) -> tuple[int, ...]:
    """Sizes at which position tables of ``module`` may end. Which of its tensors are such tables cannot be known, so
    all count: to stop at a width of a layer costs a multiple and nothing else. Positions may begin behind a row that
    stands for padding (RoBERTa), or at an ``offset`` (BART, OPT)."""
    sizes: set[int] = set()
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            begins = 0, getattr(part, "offset", 0), 0 if part.padding_idx is None else part.padding_idx + 1
            sizes.update(part.num_embeddings - begin for begin in begins)
        else:
            own = itertools.chain(part.parameters(recurse=False), part.buffers(recurse=False))
            sizes.update(size for tensor in own if not is_lazy(tensor) for size in tensor.shape)
    return tuple(sorted(sizes))


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


def used_length(batch: Any, ragged: Sequence[Ragged]) -> int:
    """Length of ``batch`` without the positions at its end that are padding in all examples; read on the host."""
    used = 1
    for entry in ragged:
        tensor = tensor_of(batch, entry)
        filled = (tensor != entry.pad).movedim(entry.dim, 0).flatten(1).any(1).nonzero()
        used = max(used, *(int(place) + 1 - entry.extra for place in filled[-1:]))
    return used


def tensor_of(batch: Any, entry: Ragged) -> Tensor:
    """The declared tensor of ``batch``. Raises ValueError, naming what there is, when it is missing or not ragged."""
    parts = _parts_of(batch)
    if isinstance(batch, tuple):  # a NamedTuple's fields have numbers, too
        parts |= {str(index): part for index, part in enumerate(batch)}
    value = parts.get(entry.field, None if isinstance(batch, Mapping) else getattr(batch, entry.field, None))
    if value is None:
        raise ValueError(f"ragged: the batch ({type(batch).__name__}) has no {entry.field!r}; it has {list(parts)}")
    if not isinstance(value, Tensor) or not -value.ndim <= entry.dim < value.ndim or entry.dim % value.ndim == 0:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"ragged: {entry.field!r} of the batch must be a tensor whose dimension {entry.dim} holds positions and "
            f"whose dimension 0 holds examples; it is {shape}"
        )
    return value


def _replaced(batch: Any, changed: Mapping[str, Any]) -> Any:
    """A shallow copy of ``batch`` with other parts."""
    if hasattr(batch, "_replace"):
        names = {name if name in batch._fields else batch._fields[int(name)]: name for name in changed}
        return batch._replace(**{target: changed[name] for target, name in names.items()})
    if isinstance(batch, list | tuple):
        return type(batch)([changed.get(str(index), value) for index, value in enumerate(batch)])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type | Mapping):
        return dataclasses.replace(batch, **changed)
    copied = copy.copy(batch)  # a BatchEncoding stays one
    put: Callable[..., None] = operator.setitem if isinstance(batch, Mapping) else setattr
    for name, value in changed.items():
        put(copied, name, value)
    return copied


def _parts_of(value: Any) -> dict[str, Any]:
    """What ``value`` is made of, by the names that ``_replaced`` takes; empty for what is taken as it is."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if isinstance(value, list | tuple):
        return {str(index): part for index, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    plain = type(value).__module__ == "builtins" or callable(value) or not hasattr(value, "__dict__")
    return {} if plain else dict(vars(value))
