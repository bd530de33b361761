"""Captioned images as data sets and batches, from any source of them.

Shape letters: B batch, H height, W width, S tokens of the longest caption (begin and end included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.captioning.task import Examples
from tasks.images import ImageDataset
from tasks.loading import BEGIN, END, ResumableDataModule, decode, load_tokenizer, pad_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tasks.captioning.task import Captioning


class CaptionBatch(NamedTuple):
    """What the loader yields and the module takes."""

    images: Tensor
    """uint8 [B, 3, H, W]."""
    tokens: Tensor
    """int64 [B, S]: begin, caption, end, then padding. The model reads S - 1 positions and predicts S - 1 targets."""
    useful_tokens: int
    """Targets that are not padding."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens",)


@dataclass(kw_only=True, slots=True)
class Collate:
    """Make a batch of (image, tokens) pairs."""

    pad_to: int | None
    """Positions of every batch; None: as many as the longest caption needs."""

    def __call__(self, items: Sequence[tuple[Tensor, Tensor]]) -> CaptionBatch:
        images, rows = zip(*items, strict=True)
        tokens_BS = pad_rows(rows, width=None if self.pad_to is None else self.pad_to + 1)
        return CaptionBatch(torch.stack(images), tokens_BS, sum(len(row) - 1 for row in rows))


class CaptionDataset(ImageDataset[tuple[Tensor, Tensor]]):
    """Pairs of image (uint8 [3, H, W]) and tokens (int64, begin ... end); item ``i`` is the same in every run."""

    def __init__(self, examples: Examples, tokenizer: Tokenizer, *, max_positions: int) -> None:
        """Tokenize all captions; leave out and count those that are empty or need more than ``max_positions``.

        Raises ValueError when no example is left.
        """
        count = len(examples.captions)
        super().__init__(examples.place, images=count)
        self._image = examples.image
        encodings = tokenizer.encode_batch_fast(examples.captions)
        lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
        # A caption of n tokens is begin + n + end: n + 1 positions are read, n + 1 predicted.
        empty, too_long = lengths == 0, lengths + 1 > max_positions
        for reason, left_out in (("empty caption", empty), ("caption too long", too_long)):
            if left_out.any():
                self.left_out[reason] = self.left_out.get(reason, 0) + int(left_out.sum())
        self._kept = np.flatnonzero(~(empty | too_long))
        if not len(self._kept):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.left_out.items()) or "it is empty"
            raise ValueError(f"{examples.place} holds no usable example ({reasons})")
        # Flat arrays instead of a list of lists: forked workers share their pages, because no reference count changes.
        kept = [encodings[index].ids for index in self._kept]
        self._ends = np.cumsum([len(ids) for ids in kept])
        self._ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in kept])
        self._image_ids = np.arange(count) if examples.image_ids is None else np.array(examples.image_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Text positions that the model computes for each example: one more than the caption has tokens."""
        return np.diff(self._ends, prepend=0) + 1

    def __len__(self) -> int:
        return len(self._kept)

    def image_id(self, index: int) -> int:
        return int(self._image_ids[self._kept[index]])

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        end = int(self._ends[index])
        start = int(self._ends[index - 1]) if index else 0
        tokens = torch.empty(end - start + 2, dtype=torch.long)
        tokens[0], tokens[-1] = BEGIN, END
        tokens[1:-1] = torch.from_numpy(self._ids[start:end])
        return self._image(int(self._kept[index])), tokens


class CaptionDataModule(ResumableDataModule):
    """Loads batches of images and captions, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer
    train_set: CaptionDataset
    val_set: CaptionDataset

    def __init__(self, task: Captioning, *, seed: int) -> None:
        super().__init__(task.data, seed=seed)
        self._task = task
        self.collate = Collate(pad_to=task.data.pad_to)

    def open(self) -> str:
        size, data = self._task.size, self._task.data
        train, val = data.splits(seed=self.seed, image_size=size.image_size)
        self.tokenizer = load_tokenizer(train.captions, vocabulary_size=size.vocabulary_size)
        most = size.max_tokens if data.pad_to is None else data.pad_to
        self.train_set, self.val_set = (
            CaptionDataset(split, self.tokenizer, max_positions=most) for split in (train, val)
        )
        return train.place

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids up to the first end."""
        return decode(self.tokenizer, tokens)
