"""Captioned images as data sets and batches, from any source of them.

Shape letters: B batch, H height, W width, S tokens of the longest caption (begin and end included).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tasks.base import BEGIN, END
from tasks.captioning.task import Examples
from tasks.loading import ResumableDataModule, load_tokenizer, pad_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


def collate(items: Sequence[tuple[Tensor, Tensor]], *, pad_to: int | None) -> CaptionBatch:
    """Make a batch of ``pad_to`` positions; None: as many as the longest caption needs."""
    images, rows = zip(*items, strict=True)
    tokens_BS = pad_rows(rows, width=None if pad_to is None else pad_to + 1)
    return CaptionBatch(torch.stack(images), tokens_BS, sum(len(row) - 1 for row in rows))


class CaptionDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of image (uint8 [3, H, W]) and tokens (int64, begin ... end); item ``i`` is the same in every run."""

    def __init__(self, examples: Examples, tokenizer: Tokenizer, *, max_positions: int) -> None:
        """Tokenize all captions; leave out and count those that are empty or need more than ``max_positions``.

        Raises ValueError when no example is left.
        """
        self._image = examples.image
        encodings = tokenizer.encode_batch_fast(examples.captions)
        lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
        # A caption of n tokens is begin + n + end: n + 1 positions are read, n + 1 predicted.
        empty, too_long = lengths == 0, lengths + 1 > max_positions
        counts = {"empty caption": int(empty.sum()), "caption too long": int(too_long.sum())}
        self.skipped = {reason: count for reason, count in counts.items() if count}
        """Examples left out, by reason."""
        self._kept = np.flatnonzero(~(empty | too_long))
        if not len(self._kept):
            raise ValueError(f"{examples.place} holds no usable example ({self.skipped or 'it is empty'})")
        # Flat arrays instead of a list of lists: forked workers share their pages, because no reference count changes.
        self.lengths: NDArray[np.int64] = lengths[self._kept] + 1
        """Text positions that the model computes for each example: one more than the caption has tokens."""
        self._ends = (self.lengths - 1).cumsum()
        self._ids = np.concatenate([np.asarray(encodings[index].ids, dtype=np.int32) for index in self._kept])

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        end, count = int(self._ends[index]), int(self.lengths[index]) - 1
        tokens = torch.empty(count + 2, dtype=torch.long)
        tokens[0], tokens[-1] = BEGIN, END
        tokens[1:-1] = torch.from_numpy(self._ids[end - count : end])
        return self._image(int(self._kept[index])), tokens


class CaptionDataModule(ResumableDataModule):
    """Loads batches of images and captions, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer

    def open(self) -> str:
        size, data = self.task.size, self.task.data
        train, val = (data.split(name, seed=self.seed, image_size=size.image_size) for name in ("train", "val"))
        self.tokenizer = load_tokenizer(train.captions, vocabulary_size=size.vocabulary_size)
        self.collate = partial(collate, pad_to=data.pad_to)
        most = size.max_tokens if data.pad_to is None else data.pad_to
        self.train_set, self.val_set = (
            CaptionDataset(split, self.tokenizer, max_positions=most) for split in (train, val)
        )
        return train.place
