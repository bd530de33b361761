"""Edges of padding buckets: the few lengths to pad up to that waste least, given the lengths of the data.

Every function takes lengths in positions and returns ascending edges; each edge is a multiple of ``multiple``, except
that none is above ``limit`` and that ``fitted`` takes the length of examples that all have one. The last edge is no
less than the longest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ascending candidate edges and the examples whose smallest edge each one would be."""


def optimal(lengths: ArrayLike, *, count: int, multiple: int, limit: int | None = None) -> tuple[int, ...]:
    """The at most ``count`` edges with the fewest padded positions of all, by dynamic programming.

    An example costs the edge it is padded up to, whatever it is batched with. Exact over all sets of multiples, in
    O(count * n^2) for n occupied multiples: under a second for n = 4,096 and any number of examples.
    """
    edges, examples = _histogram(lengths, multiple, limit)
    below = np.concatenate(([0], np.cumsum(examples)))  # examples up to each candidate
    size = len(edges)
    # best[j]: fewest positions of the examples below candidate j, using as many edges as rounds so far.
    best = np.concatenate(([0], edges * below[1:]))
    choices: list[NDArray[np.int64]] = []
    for _ in range(1, min(count, size)):
        then, choice = best.copy(), np.zeros(size + 1, dtype=np.int64)
        for j in range(2, size + 1):
            # The last bucket holds candidates i + 1 to j: all of them padded up to candidate j.
            costs = best[1:j] + edges[j - 1] * (below[j] - below[1:j])
            i = int(costs.argmin())
            if costs[i] < then[j]:
                then[j], choice[j] = costs[i], i + 1
        best = then
        choices.append(choice)
    result, j = [int(edges[-1])], size
    for choice in reversed(choices):
        if choice[j]:
            j = int(choice[j])
            result.append(int(edges[j - 1]))
    return tuple(sorted(result))


def fitted(lengths: ArrayLike, *, count: int, multiple: int, limit: int | None = None) -> tuple[int, ...]:
    """The optimal edges; examples that all have one length are not padded, be it a multiple or not."""
    edges = optimal(lengths, count=count, multiple=multiple, limit=limit)
    values = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    return (int(values[0]),) if (values == values[0]).all() else edges


def clear_of_64(edges: Sequence[int], *, multiple: int, limit: int | None = None) -> tuple[int, ...]:
    """``edges`` with the next multiple, or the limit, in the place of each that is 64 modulo 128; one that is the limit
    itself stays."""
    moved = {edge if edge % 128 != 64 else min(edge + multiple, limit or edge + multiple) for edge in edges}
    return tuple(sorted(moved))


def padded_share(lengths: ArrayLike, edges: Sequence[int]) -> float:
    """Padding over all positions when each example is padded up to its edge. Raises ValueError beyond the last one."""
    values = np.asarray(lengths, dtype=np.int64)
    places = np.searchsorted(edges, values)
    if len(values) and places.max() == len(edges):
        raise ValueError(f"length {int(values.max())} is beyond the last edge {edges[-1]}")
    positions = int(np.asarray(edges, dtype=np.int64)[places].sum())
    return 1 - int(values.sum()) / positions if positions else 0.0


def padded_share_by_edge(lengths: ArrayLike, edges: Sequence[int]) -> list[float | None]:
    """The same for the examples of each edge alone; None for an edge that no example is padded to."""
    values = np.asarray(lengths, dtype=np.int64)
    places = np.searchsorted(edges, values)
    examples = [values[places == place] for place in range(len(edges))]
    return [1 - float(own.mean()) / edge if len(own) else None for own, edge in zip(examples, edges, strict=True)]


def share_of_random_batches(lengths: ArrayLike, batch_size: int, *, seed: int = 0) -> float:
    """Padding over all positions of shuffled batches that are padded to their longest example, to compare with."""
    values: NDArray[Any] = np.random.default_rng(seed).permutation(np.asarray(lengths, dtype=np.int64))
    whole = values[: len(values) // batch_size * batch_size].reshape(-1, batch_size)
    if not len(whole):
        whole = values[None]
    return 1 - int(whole.sum()) / int(whole.max(axis=1).sum() * whole.shape[1])


def _histogram(lengths: ArrayLike, multiple: int, limit: int | None) -> Counts:
    values = np.maximum(np.asarray(lengths, dtype=np.int64), 1)  # an empty example takes a position too
    if not len(values):
        raise ValueError("there are no lengths to choose edges by")
    if limit is not None and values.max() > limit:
        raise ValueError(f"the longest example has {int(values.max())} positions, the limit is {limit}")
    counts = np.bincount(-(-values // multiple))
    places = np.flatnonzero(counts)
    edges = places * multiple
    if limit is not None:
        edges = np.minimum(edges, limit)
    return edges, counts[places]
