"""Loaders of a training and a validation set, in an order that a resumed run continues exactly where it stopped; and
the byte-level BPE that is trained on training texts and kept in a file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tasks.base import load_or_make
from tasks.special_tokens import END, PAD, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ResumableSampler(DistributedSampler[int]):
    """A permutation by seed and epoch, split over ranks, that can start within an epoch.

    It is a DistributedSampler so that Lightning keeps it and tells it the epoch; it needs no process group.
    """

    def __init__(self, dataset: Dataset[object], *, num_replicas: int, rank: int, seed: int, batch_size: int) -> None:
        """``batch_size``: examples a batch on one rank, the unit in which ``resume`` counts."""
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.batch_size = batch_size
        self.resume(epoch=0, batches=0)

    def resume(self, *, epoch: int, batches: int) -> None:
        """Start at ``batches`` batches into ``epoch``; later epochs are whole."""
        self._resume_epoch, self._resume_batches = epoch, batches

    def __iter__(self) -> Iterator[Any]:
        # Lightning builds the first iterator before it has advanced past an epoch that a checkpoint completed: the
        # epoch it tells may be one behind the one to resume in, never ahead of it. Asking again changes nothing.
        epoch = max(self.epoch, self._resume_epoch)
        batches = self._resume_batches if epoch == self._resume_epoch else 0
        order = self.order(epoch)
        # Every rank draws equally many examples: the last ones begin again at the front.
        order = (order * -(-self.total_size // max(1, len(order))))[: self.total_size]
        return iter(order[self.rank : self.total_size : self.num_replicas][batches * self.batch_size :])

    def order(self, epoch: int) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.dataset), generator=generator).tolist()  # type: ignore[arg-type]


class ResumableLoader(DataLoader[Any]):
    """A loader over a ResumableSampler with the hooks by which Lightning saves and restores it."""

    position: Callable[[], dict[str, int]]
    """Where training stands, ``{"epoch", "batches"}``; only the training loop knows, the loader fetches ahead."""

    def state_dict(self) -> dict[str, int]:
        return self.position()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        assert isinstance(self.sampler, ResumableSampler)
        self.sampler.resume(epoch=state_dict["epoch"], batches=state_dict["batches"])


class ResumableDataModule(L.LightningDataModule):
    """Base of every data module here; a subclass opens the two sets in ``open`` and says how batches are made.

    Batches are moved to the device by Lightning: a NamedTuple of tensors and host numbers goes as it is.
    """

    train_set: Any
    val_set: Any
    option: ClassVar[str] = "task.data"
    """Where a user sets the batch's size."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of items; None: torch's own rule."""

    def __init__(self, task: Any, *, seed: int) -> None:
        """``task.data`` is a ``Loading``; ``seed``: of the order of training examples."""
        super().__init__()
        self.task, self.seed, self.batch_size = task, seed, task.data.batch_size
        self._is_set_up = False

    def open(self) -> None:
        """Set ``train_set`` and ``val_set``. Raises ValueError, naming the file, for unusable input."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Open the sets, once, and read one example of each. Raises ValueError for unusable input."""
        if self._is_set_up:
            return
        self.open()
        replicas, count = self._replicas()[0], len(self.train_set)
        if count < self.batch_size * replicas:
            raise ValueError(
                f"{self.option}.batch_size={self.batch_size} on {replicas} devices is more than the "
                f"{count} training examples of {self.task.data.place()}"
            )
        # A set without one example that can be read stops here, not at the first validation.
        _ = self.train_set[0], self.val_set[0]
        self._is_set_up = True

    def train_dataloader(self) -> DataLoader[Any]:
        """Whole batches only, so that every training step has one batch size."""
        loader = ResumableLoader(
            self.train_set, sampler=self.sampler(self.train_set, shuffle=True), drop_last=True, **self._options()
        )
        loader.position = self._position
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        """Every validation example in order; the last batch may be smaller."""
        return DataLoader(self.val_set, sampler=self.sampler(self.val_set, shuffle=False), **self._options())

    def sampler(self, data: Any, *, shuffle: bool) -> DistributedSampler[Any] | None:
        """Draws examples of ``data``, resumable where it shuffles; None: in order, on one device."""
        replicas, rank = self._replicas()
        if shuffle:
            return ResumableSampler(data, num_replicas=replicas, rank=rank, seed=self.seed, batch_size=self.batch_size)
        return DistributedSampler(data, num_replicas=replicas, rank=rank, shuffle=False) if replicas > 1 else None

    def _options(self) -> dict[str, Any]:
        workers = self.task.data.workers()
        return {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
            "collate_fn": self.collate,
            # Its own generator: making an iterator would otherwise draw from the global one, which a resumed run
            # restores, and the two runs would part.
            "generator": torch.Generator().manual_seed(self.seed),
        }

    def _position(self) -> dict[str, int]:
        """The epoch and the batches of it that the training loop has taken."""
        trainer = self.trainer
        assert trainer is not None
        # What the loop took, not what the loader fetched ahead. A checkpoint written after a training step counts it.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        whole = batches >= trainer.num_training_batches
        return {"epoch": trainer.current_epoch + whole, "batches": 0 if whole else batches}

    @property
    def skipped(self) -> dict[str, int]:
        """Training and validation items left out, by reason: from the ``skipped`` of sets of user data."""
        counts: Counter[str] = Counter()
        for data in (self.train_set, self.val_set) if self._is_set_up else ():
            counts.update(getattr(data, "skipped", {}))  # generated sets leave nothing out
        return dict(counts)

    def _replicas(self) -> tuple[int, int]:
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)


def pad_rows(rows: Sequence[torch.Tensor], *, width: int | None, padding: int = PAD) -> torch.Tensor:
    """Stack int64 rows [length], padded on the right to ``width`` tokens or, where it is None, to the longest row's."""
    padded = pad_sequence(list(rows), batch_first=True, padding_value=padding)
    assert width is None or padded.shape[1] <= width, "a negative padding would cut rows"
    return padded if width is None else pad(padded, (0, width - padded.shape[1]), value=padding)


# ---- the tokenizer: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, over bytes as in GPT-2


def load_tokenizer(texts: Sequence[str], *, vocabulary_size: int) -> Tokenizer:
    """Load the tokenizer of these texts from the user's cache, or train it and keep it there.

    The file's name carries the vocabulary size and a hash of the texts: changed texts train a new tokenizer.
    """
    from tokenizers import Tokenizer

    return load_or_make(
        f"tokenizer-{vocabulary_size}-{_digest(texts)}.json",
        load=lambda path: Tokenizer.from_file(str(path)),
        make=lambda: train_tokenizer(texts, vocabulary_size=vocabulary_size),
        # Its own ``save`` raises no OSError where nothing can be written.
        save=lambda path, tokenizer: path.write_text(tokenizer.to_str(), encoding="utf-8"),
    )


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def train_tokenizer(texts: Sequence[str], *, vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE with at most ``vocabulary_size`` tokens; pad, begin and end are 0, 1 and 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return tokenizer


AT_ONCE = 4096
"""Documents encoded at once: the library's own objects take some fifty times the memory of their numbers."""


def load_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Token ids of all documents, one after the other, an ``END`` after each and nowhere else; read-only.

    Loaded from the user's cache, or encoded and kept there. The file's name carries a hash of tokenizer and texts.
    It is mapped into memory, which loader processes then share.
    """
    return load_or_make(
        f"tokens-{_digest([tokenizer.to_str(), *texts])}.npy",
        load=lambda path: np.load(path, mmap_mode="r"),
        make=lambda: encode(texts, tokenizer),
        save=np.save,
    )


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Token ids of ``texts``, an ``END`` after each; uint16 where they fit."""
    kind = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32
    parts = [np.empty(0, dtype=kind)]
    tokenizer.encode_special_tokens = True  # a text that holds "<end>" is no end
    for begin in range(0, len(texts), AT_ONCE):
        encodings = tokenizer.encode_batch_fast(texts[begin : begin + AT_ONCE], add_special_tokens=False)
        parts += [np.array([*encoding.ids, END], dtype=kind) for encoding in encodings]
    return np.concatenate(parts)
