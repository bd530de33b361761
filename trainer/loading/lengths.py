"""Lengths of a data set's examples: what the data set knows, else one pass over it, remembered for the process."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from strategies import Ragged
from strategies.padding import length_of

TELL_SECONDS = 10.0
"""Between two lines about a pass that takes long."""
EXAMPLES_AT_ONCE = 64

_measured: weakref.WeakKeyDictionary[Any, NDArray[np.int64]] = weakref.WeakKeyDictionary()
"""Lengths by data set. Not kept in a file: nothing about a data set in general says that it is the one of last time."""


def known_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """The attribute ``lengths`` of ``dataset`` or, for subsets and concatenations, of what they are made of.

    Raises ValueError when it does not have one length an example.
    """
    if isinstance(dataset, Subset):
        within = known_lengths(dataset.dataset)
        return None if within is None else within[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [known_lengths(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([p for p in parts if p is not None])
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        return None
    values = np.asarray(lengths, dtype=np.int64)
    if values.shape != (len(dataset),):
        raise ValueError(
            f"{type(dataset).__name__}.lengths must hold one length for each of {len(dataset)} examples; "
            f"its shape is {values.shape}"
        )
    return values


def measured_lengths(
    loader: DataLoader[Any], ragged: Sequence[Ragged], *, broadcast: Callable[[Any], Any], first_process: bool
) -> NDArray[np.int64]:
    """Measure every example of ``loader``'s data set as a batch of its own, with the loader's workers and collate rule.

    The first process measures and ``broadcast`` hands the result to the others, so that all of them plan the same
    batches even where an example differs from one reading to the next.
    """
    lengths = None
    if first_process:
        with contextlib.suppress(TypeError):  # what cannot be hashed or referred to weakly is measured each time
            lengths = _measured.get(loader.dataset)
        if lengths is None:
            lengths = _measure(loader, ragged)
            with contextlib.suppress(TypeError):
                _measured[loader.dataset] = lengths
    return broadcast(lengths)


class Measure:
    """Lengths of examples, each one as a batch of its own."""

    def __init__(self, collate: Callable[[Any], Any], ragged: Sequence[Ragged]) -> None:
        self._collate, self._ragged = collate, tuple(ragged)

    def __call__(self, items: Sequence[Any]) -> list[int]:
        """Lengths of ``items``."""
        return [length_of(self._collate([item]), self._ragged) for item in items]


def _measure(loader: DataLoader[Any], ragged: Sequence[Ragged]) -> NDArray[np.int64]:
    dataset: Dataset[Any] = loader.dataset
    total = len(dataset)  # type: ignore[arg-type]
    rank_zero_info(
        f"compile: measuring the lengths of {total:,} examples once; an attribute `lengths` of {type(dataset).__name__}"
        " (positions of each example) would spare this"
    )
    lengths: list[int] = []
    began = told = time.perf_counter()
    with isolate_rng():  # reading an example may draw random numbers, which the training must not miss
        for measured in DataLoader(
            dataset,
            batch_size=EXAMPLES_AT_ONCE,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            collate_fn=Measure(loader.collate_fn, ragged),
        ):
            lengths.extend(measured)
            if time.perf_counter() - told > TELL_SECONDS:
                told = time.perf_counter()
                rank_zero_info(f"compile: {len(lengths):,} of {total:,} examples measured")
    rank_zero_info(f"compile: {total:,} examples measured in {time.perf_counter() - began:.1f} s")
    return np.array(lengths, dtype=np.int64)
