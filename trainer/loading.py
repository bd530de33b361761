"""Loaders under a padding rule: batches grouped by length and padded to an edge, whoever built the loader."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence, Sized
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from strategies import Program, Ragged
from strategies.buckets.batches import BucketBatchSampler, PlannedBatch, batch_sizes
from strategies.buckets.edges import padded_share, padded_share_by_edge, share_of_random_batches
from strategies.padding import Padding, edge_of, length_of, tensor_of, to_edge


def pad_loaders(trainer: L.Trainer, program: Program) -> None:
    """Let ``trainer`` load its data under ``program.padding``, from the next loader on that it sets up."""
    # Lightning hands every loader of every stage to this hook of its strategy, wherever the loader came from, once its
    # own samplers are in place. It is public for subclasses; the strategy is the user's, so it is set on the instance.
    hook: Any = trainer.strategy.process_dataloader
    if not isinstance(hook, LoaderPadder):
        hook = LoaderPadder(trainer, hook)
        trainer.strategy.process_dataloader = hook  # type: ignore[method-assign]
        hook.watch_batches()
    hook.begin(program)


class LoaderPadder:
    """Pads each loader that a trainer sets up, and regroups the training loader where the rule has edges."""

    program: Program

    def __init__(self, trainer: L.Trainer, process: Any) -> None:
        self._trainer, self._process = trainer, process

    def begin(self, program: Program) -> None:
        """A stage begins under ``program``; a training chooses its edges anew, what follows it keeps them."""
        self.program = program
        self._collates: dict[str, list[PaddingCollate]] = {"training": [], "validation": []}
        self._batches: BucketBatchSampler | None = None
        if self._trainer.state.fn == "fit":
            self.padding.edges = self.padding.validation_batch_sizes = ()

    @property
    def padding(self) -> Padding:
        """The rule."""
        assert self.program.padding is not None
        return self.program.padding

    def watch_batches(self) -> None:
        """Show every batch to ``padding.observe`` once it is on its device."""
        to_device = self._trainer.strategy.batch_to_device

        def batch_to_device(*args: Any, **kwargs: Any) -> Any:
            batch = to_device(*args, **kwargs)
            if self.padding.observe is not None:
                self.padding.observe(batch)
            return batch

        self._trainer.strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]

    def __call__(self, loader: object) -> object:
        """Pad one loader of the stage that is being set up. Raises ValueError when that cannot be done."""
        padding, stage = self.padding, self._trainer.state.stage
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            raise ValueError(  # of a list of batches, Lightning shows the first one
                f"compile.{padding.name} takes torch DataLoaders that make batches, not a {type(loader).__name__}"
                + (" with batch_size=None" if isinstance(loader, DataLoader) else "")
            )
        padding.seen = self._seen
        if padding.choose_edges is None:
            return self._process(self._padded(loader, "training" if stage is RunningStage.TRAINING else "validation"))
        if stage is RunningStage.TRAINING:
            return self._process(self._bucketed(loader))
        if not padding.edges:
            self._find_edges(loader)
        return self._process(self._evaluated(loader))

    def _find_edges(self, loader: DataLoader[Any]) -> None:
        """Edges come from the training data; without any (``trainer.validate``), from the data at hand."""
        trainer, stage = self._trainer, self._trainer.state.stage
        if trainer.state.fn == "fit":
            # A sanity check comes before the training data, which Lightning sets up once, no matter when.
            trainer.training = True
            try:
                trainer.fit_loop.setup_data()
            finally:
                trainer.state.stage = stage
        if not self.padding.edges:
            self.padding.edges = self._edges(self._lengths(loader))
            self.program.notes.append(
                f"{self.padding.name}: edges {list(self.padding.edges)} come from the data being evaluated"
            )

    def _padded(self, loader: DataLoader[Any], kind: str) -> DataLoader[Any]:
        collate = PaddingCollate(loader.collate_fn, self.padding)
        self._collates[kind].append(collate)
        return with_collate(loader, collate)

    def _evaluated(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        sizes = {*self.padding.validation_batch_sizes, *evaluation_sizes(loader, self._trainer.limit_val_batches)}
        self.padding.validation_batch_sizes = tuple(sorted(sizes, reverse=True))
        return self._padded(loader, "validation")

    def _bucketed(self, loader: DataLoader[Any]) -> BucketLoader:
        trainer, padding = self._trainer, self.padding
        if self._batches is not None and trainer.train_dataloader is None:  # else Lightning reloads the first one
            raise ValueError(f"compile.{padding.name} takes one training loader; this training has several")
        require_map_style(loader, padding.name)
        require_replaceable_order(loader, padding.name)
        lengths = self._lengths(loader)
        padding.edges = self._edges(lengths)
        split = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        try:
            sizes = batch_sizes(padding.edges, rows=loader.batch_size, tokens_per_batch=padding.tokens_per_batch)
            batches = BucketBatchSampler(
                lengths,
                sizes,
                replicas=split["num_replicas"],
                rank=split["rank"],
                seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
                same_every_epoch=trainer.overfit_batches > 0,  # type: ignore[attr-defined]
                drop_last=loader.drop_last,
            )
        except ValueError as error:
            raise ValueError(f"compile.{padding.name}: {error}") from error
        padding.batch_sizes = batches.rows_by_edge
        if self._batches is None:  # not for a loader that Lightning reloads later on
            self._resume(batches)
        self._batches = batches
        collate = PaddingCollate(loader.collate_fn, padding)
        self._collates["training"] = [collate]
        self._report(lengths, batches, loader)
        return with_buckets(loader, batches, collate)

    def _edges(self, lengths: NDArray[np.int64]) -> tuple[int, ...]:
        assert self.padding.choose_edges is not None
        try:
            return self.padding.choose_edges(lengths)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"compile.{self.padding.name}: {error}") from error

    def _lengths(self, loader: DataLoader[Any]) -> NDArray[np.int64]:
        require_map_style(loader, self.padding.name)
        known = known_lengths(loader.dataset)
        if known is not None:
            return known
        return measured_lengths(
            loader,
            self.padding.ragged,
            broadcast=self._trainer.strategy.broadcast,
            first_process=self._trainer.is_global_zero,
        )

    def _resume(self, batches: BucketBatchSampler) -> None:
        """Go on where the loop's restored progress says: it counts the batches it took, not those fetched ahead."""
        loop = self._trainer.fit_loop
        if self._trainer.ckpt_path is None:
            return
        # Lightning warns that the data are not resumable when a loader has no state of its own; these are.
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is not resumable")
        progress, epoch = loop.epoch_loop.batch_progress, self._trainer.current_epoch
        if progress.is_last_batch:
            batches.resume(epoch=epoch + 1, batches=0)
        else:
            batches.resume(epoch=epoch, batches=progress.current.ready)

    def _report(self, lengths: NDArray[np.int64], batches: BucketBatchSampler, loader: DataLoader[Any]) -> None:
        padding, by_edge = self.padding, batches.batches_by_edge()
        report = {
            "edges": list(padding.edges),
            "batch_sizes": [batches.batch_sizes[edge] for edge in padding.edges],
            "examples": [int(count) for count in batches.examples],
            "batches_each_epoch": [by_edge[edge] for edge in padding.edges],
            "left_out_each_epoch": batches.left_out,
            "longest": int(lengths.max()),
            "padded_share_of_the_edges": padded_share(lengths, padding.edges),
            "padded_share_by_edge": padded_share_by_edge(lengths, padding.edges),
            "expected_padded_share": batches.planned_padded_share,
            "padded_share_of_random_batches": None
            if loader.batch_size is None
            else share_of_random_batches(lengths, loader.batch_size, seed=batches.seed),
        }
        self.program.report[padding.name] = report
        sizes = sorted({rows for several in padding.batch_sizes.values() for rows in several})
        rows = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        note = (
            f"{padding.name}: {len(lengths):,} examples padded up to {', '.join(map(str, padding.edges))}; "
            f"batches of {rows}; expected padded share {batches.planned_padded_share:.1%}"
        )
        if report["padded_share_of_random_batches"] is not None:
            note += f" (random batches padded to their longest: {report['padded_share_of_random_batches']:.1%})"
        if batches.left_out:
            note += f"; {batches.left_out} left out each epoch, others each time: the loader's drop_last=True"
        self.program.notes.append(note)
        if isinstance(loader.sampler, SequentialSampler) and batches.replicas == 1:
            self.program.notes.append(f"{padding.name}: the training loader did not shuffle its examples; they are now")

    def _seen(self) -> dict[str, Any]:
        """What was handed out so far."""
        figures: dict[str, Any] = {
            f"unexpected_{kind}_batches": sum(collate.unexpected for collate in collates)
            for kind, collates in self._collates.items()
        }
        if self._batches is not None and self._batches.drawn["positions"]:
            drawn = self._batches.drawn
            figures["drawn_batches"] = drawn["batches"]
            figures["seen_padded_share"] = 1 - drawn["useful_positions"] / drawn["positions"]
        return figures


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


LOADER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""What a rebuilt loader takes over from the user's."""


class PlannedItems(list[Any]):
    """Examples of one batch, and the edge it is planned to be padded up to."""

    edge: int


class PlannedData(Dataset[Any]):
    """A user's data set whose batches of examples remember the edge that was planned for them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        """Examples."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """One example."""
        return self._dataset[index]

    def __getitems__(self, indices: PlannedBatch) -> PlannedItems:
        """Examples of one batch; the method that torch's loader prefers where a data set has it."""
        fetch = getattr(self._dataset, "__getitems__", None)
        items = PlannedItems(fetch(list(indices)) if fetch else [self._dataset[index] for index in indices])
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
        self._edges, self._multiple, self._limit = padding.edges, padding.multiple, padding.limit
        # In shared memory, so that the main process sees what worker processes counted.
        self._unexpected = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def unexpected(self) -> int:
        """Batches so far that were longer than planned, or than the last edge."""
        return int(self._unexpected)

    def __call__(self, items: Sequence[Any]) -> Any:
        """Collate ``items`` and pad. Raises ValueError when a declared tensor is missing."""
        planned = items.edge if isinstance(items, PlannedItems) else None
        batch = self._collate(list(items) if planned is not None else items)
        length = length_of(batch, self._ragged)
        edge = edge_of(length, self._edges, self._multiple, self._limit) if planned is None else planned
        if planned is not None and length > planned and not self._ends_in_padding(batch, planned):
            edge = edge_of(length, self._edges, self._multiple, self._limit)
            self._unexpected += 1
        elif planned is None and self._edges and length > self._edges[-1]:
            self._unexpected += 1
        return to_edge(batch, self._ragged, edge)

    def _ends_in_padding(self, batch: Any, edge: int) -> bool:
        """Whether all beyond ``edge`` is padding: a collate function that pads to a fixed length may be cut short."""
        for entry in self._ragged:
            tensor = tensor_of(batch, entry)
            width = edge + entry.extra
            beyond = tensor.narrow(
                entry.dim, min(width, tensor.shape[entry.dim]), max(0, tensor.shape[entry.dim] - width)
            )
            if not bool((beyond == entry.pad).all()):
                return False
        return True


class BucketLoader(DataLoader[Any]):
    """The user's loader with batches drawn by length."""

    padded_from: DataLoader[Any]
    """The loader it replaces."""


class StatefulBucketLoader(BucketLoader):
    """Stands for a loader that Lightning keeps the state of, so that each one's checkpoints load with the other."""

    def state_dict(self) -> dict[str, Any]:
        """What the user's loader says."""
        return self.padded_from.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: batches taken are counted by the training loop, whose progress is restored already."""


def with_buckets(loader: DataLoader[Any], batches: BucketBatchSampler, collate: PaddingCollate) -> BucketLoader:
    """Rebuild ``loader`` with its data and options but other batches."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if options["generator"] is None:
        # Its own: making an iterator would otherwise draw from the global one, which a resumed run restores.
        options["generator"] = torch.Generator().manual_seed(batches.seed)
    rebuilt = (StatefulBucketLoader if stateful else BucketLoader)(
        PlannedData(loader.dataset), batch_sampler=batches, collate_fn=collate, **options
    )
    rebuilt.padded_from = loader
    return rebuilt


def with_collate(loader: DataLoader[Any], collate: PaddingCollate) -> DataLoader[Any]:
    """A copy of ``loader``, of its class and with its sampler, that pads its batches; the user's own stays as it is."""
    copied = copy.copy(loader)
    copied._iterator = None  # persistent workers of the user's loader are not ours
    copied.collate_fn = collate
    return copied
