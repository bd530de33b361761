"""Buckets: the edges that waste least; batches of like length in an order that ranks share and resumes repeat; and
loaders of such batches, padded by what wraps the user's collate function.

Any torch DataLoader is taken whose own choice of examples is not lost by it. What trains decides when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from strategies.base import Padding
from strategies.padding import length_of, to_edge, used_length


class PlannedBatch(list[Any]):
    """Examples of one batch on one rank, or their numbers, and the edge that all ranks pad this step's batch up to."""

    edge: int


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of one bucket each, by seed and epoch alone, so that every rank plans the same.

    Each epoch shuffles the examples within their buckets and cuts them into batches for all ranks together, longest
    bucket first. The last batch of a bucket is filled with examples of the next shorter one. So every batch of an
    edge has the same rows. Fewer examples than the smallest batch remain. Without ``drop_last`` they are one smaller
    batch at the end, of the shortest ones; ranks share it evenly, and repeat some where it does not divide, as
    ``torch.utils.data.DistributedSampler`` does. With ``drop_last`` as many are left out (``left_out``), each epoch the
    next ones of a random order of all examples. None is left out twice before every other one was.

    Batches of a bucket are spread evenly over the epoch, each at a random place within its stretch. So after any number
    of steps, each of K buckets has had its share of them to within K + 1 batches. Which examples share a batch, and
    in what order they come, is random.

    With ``warm`` the very first epoch begins with one batch of each bucket, the longest first: by then every shape has
    come, and memory has been at its most. The other batches keep their order.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch_sizes: Mapping[int, int],
        *,
        replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        same_every_epoch: bool = False,
        drop_last: bool = False,
        warm: bool = False,
    ) -> None:
        """Plan batches of ``batch_sizes[edge]`` rows a rank for examples of ``lengths``.

        Raises ValueError when an example is longer than the last edge, or ``drop_last`` leaves no batch.
        """
        self.edges = tuple(sorted(batch_sizes))
        self.lengths: NDArray[np.int64] = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
        self.batch_sizes = {edge: batch_sizes[edge] for edge in self.edges}
        self.replicas, self.rank, self.seed = replicas, rank, seed
        self._same_every_epoch, self._warm = same_every_epoch, warm
        self._bucket = np.searchsorted(self.edges, self.lengths).astype(np.uint16)
        too_long = int((self._bucket == len(self.edges)).sum())
        if too_long:
            raise ValueError(
                f"{too_long} of {len(self.lengths)} training examples are longer than the last edge "
                f"{self.edges[-1]}; the longest has {int(self.lengths.max())} positions"
            )
        self.examples = np.bincount(self._bucket, minlength=len(self.edges))
        """Examples by bucket."""
        self._starts, self._buckets, self._rows, self.left_out = self._cut(drop_last=drop_last)
        if not len(self._starts):
            raise ValueError(
                f"{len(self.lengths)} training examples make no batch of {self.batch_sizes[self.edges[-1]]} on "
                f"{replicas} devices, and the training loader's drop_last=True leaves smaller ones out"
            )
        self.epoch = 0
        self._resume_epoch = self._resume_batches = 0
        self.drawn = {"batches": 0, "positions": 0, "useful_positions": 0}
        """What this rank's loader has drawn so far; it fetches a few batches ahead of the training."""

    def _cut(self, *, drop_last: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
        """Cut the examples, sorted by bucket, into batches from the long end; the same in every epoch.

        Returns where each batch begins, its bucket, its rows on all ranks, and how many examples are left out. The cut
        fits whichever examples are left out: each of the others then comes no nearer to the long end than here.
        """
        ends = np.cumsum(self.examples)
        rows = [self.batch_sizes[edge] * self.replicas for edge in self.edges]
        cuts: list[tuple[int, int, int]] = []
        left = len(self.lengths)
        while left:
            bucket = int(np.searchsorted(ends, left))  # that of the longest example left
            # Too few for a batch of their own may still be a batch of longer ones, which have fewer rows.
            fitting = [index for index in range(bucket, len(rows)) if rows[index] <= left]
            if not fitting and drop_last:
                break
            chosen, count = (fitting[0], rows[fitting[0]]) if fitting else (bucket, left)
            left -= count
            cuts.append((left, chosen, count))
        starts, buckets, counts = np.array(cuts, dtype=np.int64).reshape(-1, 3).T
        return starts - left, buckets, counts, left

    @property
    def sampler(self) -> BucketBatchSampler:
        """Itself: Lightning tells the epoch to ``batch_sampler.sampler``."""
        return self

    @property
    def rows_by_edge(self) -> dict[int, tuple[int, ...]]:
        """Rows of the batches of each edge that has any, on each rank, most first."""
        rows = -(-self._rows // self.replicas)
        return {
            self.edges[bucket]: tuple(sorted({*rows[self._buckets == bucket].tolist()}, reverse=True))
            for bucket in np.unique(self._buckets)
        }

    def planned(self) -> dict[str, Any]:
        """For the record: what an epoch holds on each rank. Padding over all positions is expected as the epoch is cut,
        with examples of mean length left out."""
        rows = -(-self._rows // self.replicas) * self.replicas  # of all ranks
        positions = int((np.asarray(self.edges)[self._buckets] * rows).sum())
        return {
            "edges": list(self.edges),
            "batch_sizes": list(self.batch_sizes.values()),
            "examples": self.examples.tolist(),
            "batches_each_epoch": np.bincount(self._buckets, minlength=len(self.edges)).tolist(),
            "left_out_each_epoch": self.left_out,
            "longest": int(self.lengths.max()),
            "expected_padded_share": 1 - float(self.lengths.mean()) * int(rows.sum()) / positions,
        }

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def resume(self, *, epoch: int, batches: int) -> None:
        """Start at ``batches`` batches into ``epoch``; later epochs are whole."""
        self._resume_epoch, self._resume_batches = epoch, batches

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's batches of the epoch, without those that were trained on before."""
        # As in a resumable order of single examples: the epoch that Lightning tells may be one behind the one to
        # resume in, never ahead of it.
        epoch = max(self.epoch, self._resume_epoch)
        skipped = self._resume_batches if epoch == self._resume_epoch else 0
        examples, order = self._shuffled(0 if self._same_every_epoch else epoch)
        for batch in order[skipped:]:
            start, rows, edge = int(self._starts[batch]), int(self._rows[batch]), self.edges[self._buckets[batch]]
            places = np.arange(self.rank, -(-rows // self.replicas) * self.replicas, self.replicas) % rows
            chosen = examples[start + places]
            planned = PlannedBatch(chosen.tolist())
            planned.edge = edge
            self.drawn["batches"] += 1
            self.drawn["positions"] += edge * len(planned)
            self.drawn["useful_positions"] += int(self.lengths[chosen].sum())
            yield planned

    def _shuffled(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples sorted by bucket and shuffled within, and the order of batches; drawn from seed and epoch alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).numpy()
        if self.left_out:
            rotation = torch.randperm(len(shuffled), generator=torch.Generator().manual_seed(self.seed)).numpy()
            out = rotation[np.arange(epoch * self.left_out, (epoch + 1) * self.left_out) % len(rotation)]
            shuffled = shuffled[~np.isin(shuffled, out)]
        examples = shuffled[np.argsort(self._bucket[shuffled], kind="stable")]
        places = torch.rand(len(self._starts), generator=generator, dtype=torch.float64).numpy()
        for bucket in np.unique(self._buckets):
            chosen = np.flatnonzero(self._buckets == bucket)
            stretch = torch.randperm(len(chosen), generator=generator).numpy()
            places[chosen] = (stretch + places[chosen]) / len(chosen)
        full = np.array([self.batch_sizes[edge] for edge in self.edges]) * self.replicas
        smaller = self._rows < full[self._buckets]
        if self._warm and epoch == 0:  # by the epoch alone, so that whoever resumes within it finds the same order
            for bucket in np.unique(self._buckets):
                if len(whole := np.flatnonzero((self._buckets == bucket) & ~smaller)):
                    places[whole[places[whole].argmin()]] = -bucket.item() - 1.0
        places[smaller] = 1.0  # the smaller batch comes last, as elsewhere
        return examples, np.argsort(places, kind="stable")


def batch_sizes(edges: Sequence[int], *, rows: int | None, tokens_per_batch: int | None) -> dict[int, int]:
    """Rows of a batch on one device by edge: ``rows``, or as many as fit into ``tokens_per_batch`` positions.

    From 16 rows on they are rounded down to a multiple of 8, which is what matrix units like. Raises ValueError when
    neither is given.
    """
    if tokens_per_batch is None:
        if rows is None:
            raise ValueError("the training loader has no batch size; set tokens_per_batch, or give the loader one")
        return dict.fromkeys(edges, rows)
    fitting = {edge: max(1, tokens_per_batch // edge) for edge in edges}
    return {edge: count if count < 16 else count // 8 * 8 for edge, count in fitting.items()}


# ---- edges -----------------------------------------------------------------------------------------------------------
# Lengths are in positions. Each edge is a multiple of ``multiple``, except that none is above ``limit`` and that
# examples of one length are not padded. The last edge is no less than the longest length.


def optimal(lengths: ArrayLike, *, count: int, multiple: int, limit: int | None = None) -> tuple[int, ...]:
    """The at most ``count`` edges with the fewest padded positions of all, by dynamic programming.

    An example costs the edge it is padded up to, whatever it is batched with. Exact over all sets of multiples, in
    O(count * n^2) for n occupied multiples: under a second for n = 4,096 and any number of examples.
    """
    values = np.maximum(np.asarray(lengths, dtype=np.int64), 1)  # an empty example takes a position too
    if not len(values):
        raise ValueError("there are no lengths to choose edges by")
    if (values == values[0]).all():
        return (int(values[0]),)
    counts = np.bincount(-(-values // multiple))
    places = np.flatnonzero(counts)
    # Candidates, and the examples whose smallest edge each one would be.
    edges, examples = places * multiple, counts[places]
    if limit is not None:
        edges = np.minimum(edges, limit)
    below = np.concatenate(([0], np.cumsum(examples)))  # examples up to each candidate
    size = len(edges)
    # best[j]: fewest positions of the examples below candidate j, using as many edges as rounds so far; one more costs
    # no more.
    best = np.concatenate(([0], edges * below[1:]))
    choices: list[NDArray[np.int64]] = []
    for _ in range(1, min(count, size)):
        then, choice = best.copy(), np.zeros(size + 1, dtype=np.int64)
        for j in range(2, size + 1):
            # The last bucket holds candidates i + 1 to j: all of them padded up to candidate j.
            costs = best[1:j] + edges[j - 1] * (below[j] - below[1:j])
            then[j], choice[j] = costs.min(), costs.argmin() + 1
        best = then
        choices.append(choice)
    result, j = [int(edges[-1])], size
    for choice in reversed(choices):
        if choice[j]:
            j = int(choice[j])
            result.append(int(edges[j - 1]))
    return tuple(sorted(result))


def clear_of_64(edges: Sequence[int], *, multiple: int, limit: int | None = None) -> tuple[int, ...]:
    """``edges``, each that is 64 modulo 128 moved up by ``multiple``, but not above ``limit``."""
    moved = {edge if edge % 128 != 64 else min(edge + multiple, limit or edge + multiple) for edge in edges}
    return tuple(sorted(moved))


def require_map_style(loader: DataLoader[Any], name: str) -> None:
    """Raise ValueError when examples cannot be fetched by their number."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        raise ValueError(
            f"compile.{name}: {type(dataset).__name__} cannot be grouped by length: it takes a data set with a length, "
            "whose examples are fetched by their number; compile=dynamic takes others too"
        )


def require_replaceable_order(loader: DataLoader[Any], name: str) -> None:
    """Raise ValueError when the training loader's own choice of examples would be lost."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"compile.{name}: the training loader draws its batches by a {type(batches).__name__}, which buckets would "
            "replace; give it a batch_size instead"
        )
    if isinstance(sampler, RandomSampler):
        whole = not sampler.replacement and sampler.num_samples == len(sampler) == len(sampler.data_source)
    elif isinstance(sampler, DistributedSampler):
        whole = sampler.dataset is loader.dataset
    else:
        whole = isinstance(sampler, SequentialSampler)
    if not whole:
        raise ValueError(
            f"compile.{name}: the training loader draws its examples by a {type(sampler).__name__} of its own, which "
            "buckets would replace by each example once an epoch; use a Subset of the data, or compile=dynamic"
        )


LOADER_OPTIONS = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)
"""What a rebuilt loader takes over from the user's."""


class PlannedData(Dataset[Any]):
    """A user's data set whose batches of examples remember the edge that was planned for them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: PlannedBatch) -> PlannedBatch:
        """Examples of one batch; the method that torch's loader prefers where a data set has it."""
        fetch = getattr(self._dataset, "__getitems__", None)
        items = PlannedBatch(fetch(list(indices)) if fetch else [self._dataset[index] for index in indices])
        items.edge = indices.edge
        return items

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of it, the user's data set answers."""
        if name == "_dataset":  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self._dataset, name)


class PaddingCollate:
    """The user's collate function, and then padding up to the planned edge or, without a plan, the next one."""

    def __init__(self, collate: Callable[[Any], Any], padding: Padding) -> None:
        self._collate = collate
        self._ragged, self._edge_of = padding.ragged, padding.edge_of
        self._longest = padding.edges[-1] if padding.edges else None
        # In shared memory, so that the main process sees what worker processes counted.
        self._unexpected = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def unexpected(self) -> int:
        """Batches so far that were longer than planned, or than the last edge."""
        return int(self._unexpected)

    def __call__(self, items: Sequence[Any]) -> Any:
        """Collate ``items`` and pad. Raises ValueError when a declared tensor is missing."""
        planned = items.edge if isinstance(items, PlannedBatch) else None
        batch = self._collate(items if planned is None else list(items))
        length = length_of(batch, self._ragged)
        if planned is None:
            longer = self._longest is not None and length > self._longest
        else:  # a collate function that pads to a fixed length is cut short
            longer = length > planned and used_length(batch, self._ragged) > planned
        self._unexpected += longer
        edge = planned if planned is not None and not longer else self._edge_of(length)
        return to_edge(batch, self._ragged, edge)


def with_buckets(loader: DataLoader[Any], batches: BucketBatchSampler, collate: PaddingCollate) -> DataLoader[Any]:
    """Rebuild ``loader`` with its data and options but other batches."""
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if options["generator"] is None:
        # Its own: making an iterator would otherwise draw from the global one, which a resumed run restores.
        options["generator"] = torch.Generator().manual_seed(batches.seed)
    rebuilt: Any = DataLoader(PlannedData(loader.dataset), batch_sampler=batches, collate_fn=collate, **options)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        # Lightning keeps the state of such a loader: each one's checkpoints load with the other. What was taken is
        # counted by the training loop, whose progress is restored already.
        rebuilt.state_dict, rebuilt.load_state_dict = loader.state_dict, lambda state: None
    return rebuilt


def with_collate(loader: DataLoader[Any], collate: PaddingCollate) -> DataLoader[Any]:
    """A copy of ``loader``, of its class and with its sampler, that pads its batches; the user's own stays as it is."""
    copied = copy.copy(loader)
    copied._iterator = None  # persistent workers of the user's loader are not ours
    copied.collate_fn = collate
    return copied
