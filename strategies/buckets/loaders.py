"""Loaders with padded batches: batches drawn by length, padded by what wraps the user's collate function.

Any torch DataLoader is taken whose own choice of examples is not lost by it. What trains decides when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from strategies.base import Ragged
from strategies.buckets.batches import BucketBatchSampler, PlannedBatch
from strategies.padding import Padding, length_of, to_edge, used_length


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


def evaluation_sizes(loader: DataLoader[Any], limit: float | None) -> set[int]:
    """Rows of the batches that an evaluation of ``limit`` batches (or that share of them) meets; empty if unknown."""
    rows = loader.batch_size
    if rows is None or not isinstance(loader.sampler, Sized):
        return set()
    whole, last = divmod(len(loader.sampler), rows)
    batches = len(loader)
    if limit is not None:
        batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    partial = last and not loader.drop_last and batches == whole + 1
    return {*([rows] if min(whole, batches) else []), *([last] if partial else [])}


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
        self._ragged: tuple[Ragged, ...] = padding.ragged
        self._edge_of = padding.edge_of
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
        batch = self._collate(list(items) if planned is not None else items)
        length = length_of(batch, self._ragged)
        edge = self._edge_of(length) if planned is None else planned
        # A collate function that pads to a fixed length is cut short.
        if planned is not None and length > planned and used_length(batch, self._ragged) > planned:
            edge = self._edge_of(length)
            self._unexpected += 1
        elif planned is None and self._longest is not None and length > self._longest:
            self._unexpected += 1
        return to_edge(batch, self._ragged, edge)


class StatefulBucketLoader(DataLoader[Any]):
    """Stands for a loader that Lightning keeps the state of, so that each one's checkpoints load with the other."""

    padded_from: DataLoader[Any]

    def state_dict(self) -> dict[str, Any]:
        return self.padded_from.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: batches taken are counted by the training loop, whose progress is restored already."""


def with_buckets(loader: DataLoader[Any], batches: BucketBatchSampler, collate: PaddingCollate) -> DataLoader[Any]:
    """Rebuild ``loader`` with its data and options but other batches."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if options["generator"] is None:
        # Its own: making an iterator would otherwise draw from the global one, which a resumed run restores.
        options["generator"] = torch.Generator().manual_seed(batches.seed)
    rebuilt = (StatefulBucketLoader if stateful else DataLoader)(
        PlannedData(loader.dataset), batch_sampler=batches, collate_fn=collate, **options
    )
    if isinstance(rebuilt, StatefulBucketLoader):
        rebuilt.padded_from = loader
    return rebuilt


def with_collate(loader: DataLoader[Any], collate: PaddingCollate) -> DataLoader[Any]:
    """A copy of ``loader``, of its class and with its sampler, that pads its batches; the user's own stays as it is."""
    copied = copy.copy(loader)
    copied._iterator = None  # persistent workers of the user's loader are not ours
    copied.collate_fn = collate
    return copied


def plan_notes(padding: Padding, batches: BucketBatchSampler, loader: DataLoader[Any]) -> list[str]:
    sizes = sorted({rows for several in padding.batch_sizes.values() for rows in several})
    rows = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    note = (
        f"{padding.name}: {len(batches.lengths):,} examples padded up to {', '.join(map(str, padding.edges))}; "
        f"batches of {rows}; expected padded share {batches.planned_padded_share:.1%}"
    )
    if batches.left_out:
        note += f"; {batches.left_out} left out each epoch, others each time: the loader's drop_last=True"
    if not isinstance(loader.sampler, SequentialSampler) or batches.replicas > 1:
        return [note]
    return [note, f"{padding.name}: the training loader did not shuffle its examples; they are now"]
