"""Accepted: which loaders can be grouped by length without losing their own choice of examples, and what they hold."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)


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
    whole = (
        isinstance(sampler, SequentialSampler)
        or (isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler))
        or (isinstance(sampler, DistributedSampler) and sampler.dataset is loader.dataset)
    )
    if not whole or (isinstance(sampler, RandomSampler) and len(sampler) != len(sampler.data_source)):
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
    if isinstance(limit, float):
        batches = int(batches * limit)
    elif limit is not None:
        batches = min(batches, limit)
    sizes = {rows} if min(whole, batches) else set()
    if last and not loader.drop_last and batches == whole + 1:
        sizes.add(last)
    return sizes
