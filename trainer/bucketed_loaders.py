"""Loaders under a padding rule: batches grouped by length and padded to an edge, whoever built the loader."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from strategies import Program, Ragged
from strategies.base import Padding
from strategies.buckets.batches import (
    BucketBatchSampler,
    PaddingCollate,
    batch_sizes,
    require_map_style,
    require_replaceable_order,
    with_buckets,
    with_collate,
)
from strategies.padding import length_of, to_edge, used_length
from trainer.loops.lightning_internals import replaced

MEASURED_AT_ONCE = 64
PADDING_TOLERANCE = 1e-4
"""Relative: kernels for another length add up in another order. Padding that counts changes a loss by its own share."""

_measured: weakref.WeakKeyDictionary[Any, NDArray[np.int64]] = weakref.WeakKeyDictionary()
"""Lengths by data set. Not kept in a file: nothing about a data set in general says that it is the one of last time."""


@contextlib.contextmanager
def padded_loaders(trainer: L.Trainer, program: Program) -> Iterator[None]:
    """Within, ``trainer`` loads its data under ``program.padding``, from the next loader on that it sets up."""
    # Lightning hands every loader of every stage to this hook of its strategy, wherever the loader came from, once its
    # own samplers are in place. It is public for subclasses; the strategy is the user's, so it is set on the instance.
    padder = LoaderPadder(trainer, program)
    strategy, fit_loop = trainer.strategy, trainer.fit_loop
    with (
        replaced(strategy, "process_dataloader", padder),
        replaced(fit_loop, "setup_data", partial(padder.set_up_data, fit_loop.setup_data)),
    ):
        yield


class LoaderPadder:
    """Pads each loader that a trainer sets up for one stage, and regroups the training loader where the rule has edges.

    A training chooses its edges anew; what follows it keeps them.
    """

    def __init__(self, trainer: L.Trainer, program: Program) -> None:
        self._trainer, self._process = trainer, trainer.strategy.process_dataloader
        self.program = program
        self._collates: dict[str, list[PaddingCollate]] = {"training": [], "validation": []}
        self._batches: BucketBatchSampler | None = None
        self._several = False
        if trainer.state.fn == "fit":
            self.padding.edges = ()

    @property
    def padding(self) -> Padding:
        assert self.program.padding is not None
        return self.program.padding

    def set_up_data(self, set_up: Callable[[], None]) -> None:
        """Lightning or its learning rate finder may set up the first loader again."""
        self._several = False
        set_up()

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
            return self._process(self._padded(loader, "training" if stage == RunningStage.TRAINING else "validation"))
        if stage == RunningStage.TRAINING:
            return self._process(self._bucketed(loader))
        if not padding.edges:
            self._find_edges(loader)
        return self._process(self._padded(loader, "validation"))

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

    def _bucketed(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        trainer, padding = self._trainer, self.padding
        if self._several:
            raise ValueError(f"compile.{padding.name} takes one training loader; this training has several")
        require_map_style(loader, padding.name)
        require_replaceable_order(loader, padding.name)
        lengths = self._lengths(loader)
        padding.edges = self._edges(lengths)
        split = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        with self._naming():
            sizes = batch_sizes(padding.edges, rows=loader.batch_size, tokens_per_batch=padding.tokens_per_batch)
            batches = BucketBatchSampler(
                lengths,
                sizes,
                replicas=split["num_replicas"],
                rank=split["rank"],
                seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
                same_every_epoch=trainer.overfit_batches > 0,  # type: ignore[attr-defined]
                drop_last=loader.drop_last,
                warm=padding.warm,
            )
        padding.batch_sizes, self._several = batches.rows_by_edge, True
        if self._batches is None:  # not for a loader that Lightning reloads later on
            self._resume(batches)
        self._batches = batches
        collate = PaddingCollate(loader.collate_fn, padding)
        self._collates["training"] = [collate]
        self.program.report[padding.name] = batches.planned()
        if isinstance(loader.sampler, SequentialSampler) and batches.replicas == 1:
            self.program.notes.append(f"{padding.name}: the training loader did not shuffle its examples; they are now")
        return with_buckets(loader, batches, collate)

    def _edges(self, lengths: NDArray[np.int64]) -> tuple[int, ...]:
        assert self.padding.choose_edges is not None
        with self._naming():
            return self.padding.choose_edges(lengths)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"compile.{self.padding.name}: {error}") from error

    def _lengths(self, loader: DataLoader[Any]) -> Any:
        """One of each example; where the data set does not know them, the first process measures, so that all plan the
        same batches even where an example differs from one reading to the next."""
        require_map_style(loader, self.padding.name)
        lengths: Any = known_lengths(loader.dataset)
        if lengths is not None:
            return lengths
        if self._trainer.is_global_zero:
            with contextlib.suppress(TypeError):  # what cannot be hashed or referred to weakly is measured each time
                lengths = _measured.get(loader.dataset)
            if lengths is None:
                lengths = measured_lengths(loader, self.padding.ragged)
                with contextlib.suppress(TypeError):
                    _measured[loader.dataset] = lengths
        return self._trainer.strategy.broadcast(lengths)

    def _resume(self, batches: BucketBatchSampler) -> None:
        """Continue where the loop's restored progress says: it counts the batches it took, not those fetched ahead."""
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


def known_lengths(dataset: Any) -> NDArray[np.int64] | None:
    """The attribute ``lengths`` of ``dataset``, if it has one. Raises ValueError unless it has a length an example."""
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


def measured_lengths(loader: DataLoader[Any], ragged: Sequence[Ragged]) -> NDArray[np.int64]:
    """Measure each example of ``loader``'s data set as a batch of its own, with its workers and collate rule."""
    dataset: Dataset[Any] = loader.dataset
    total = len(dataset)  # type: ignore[arg-type]
    rank_zero_info(
        f"compile: measuring the lengths of {total:,} examples once; an attribute `lengths` of {type(dataset).__name__}"
        " (positions of each example) would spare this"
    )
    with isolate_rng():  # reading an example may draw random numbers, which the training must not miss
        batches = DataLoader(
            dataset,
            batch_size=MEASURED_AT_ONCE,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            collate_fn=partial(_lengths_of, collate=loader.collate_fn, ragged=ragged),
        )
        lengths = [length for measured in batches for length in measured]
    return np.array(lengths, dtype=np.int64)


def _lengths_of(items: Sequence[Any], *, collate: Callable[[Any], Any], ragged: Sequence[Ragged]) -> list[int]:
    """Lengths of examples, each one as a batch of its own."""
    return [length_of(collate([item]), ragged) for item in items]


# ---- what padding does to a loss, which the tools ask ----------------------------------------------------------------


def loss_of_padding(module: L.LightningModule, batch: Any, ragged: Sequence[Ragged]) -> str:
    """A line where ``training_step`` returns another loss on ``batch`` than on the same without what is padding in all
    of its rows; empty where it does not, and where that cannot be known: it needs a trainer or draws random numbers.

    A copy of ``module`` runs, in eval mode. ``module`` is in training.
    """
    shorter = to_edge(batch, ragged, used_length(batch, ragged))
    if shorter is batch or not module.automatic_optimization:
        return ""
    try:
        copied = copy.deepcopy(module, {id(module.trainer): None}).eval()
        more = {"batch_idx": 0} if "batch_idx" in inspect.signature(copied.training_step).parameters else {}
        losses: list[float] = []
        with isolate_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no trainer to log to
            for one in (batch, batch, shorter):
                returned: Any = copied.training_step(copy.deepcopy(one), **more)
                losses.append(float(returned["loss"] if isinstance(returned, dict) else returned))
    except Exception:  # somebody else's code, which may rely on what the copy does not have
        return ""
    padded, again, without = losses
    tolerance = PADDING_TOLERANCE * abs(padded)
    if abs(padded - again) > tolerance or not abs(padded - without) > tolerance:
        return ""
    return (
        f"padding changes the loss: {padded:.6g} of a batch with its padding, {without:.6g} without; attention, "
        "recurrent layers and the loss have to leave it out"
    )
