"""Captioned images as data sets and batches, from any source of them.

Shape letters: B batch, H height, W width, S tokens of the longest caption (begin and end included).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.resumable_data import ResumableDataModule, load_tokenizer, load_tokens, pad_rows
from tasks.special_tokens import BEGIN, END

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
        return ("useful_tokens",)


def collate(items: Sequence[tuple[Tensor, Tensor]], *, pad_to: int | None) -> CaptionBatch:
    """Make a batch of ``pad_to`` positions; None: as many as the longest caption needs."""
    images, rows = zip(*items, strict=True)
    tokens_BS = pad_rows(rows, width=None if pad_to is None else pad_to + 1)
    return CaptionBatch(torch.stack(images), tokens_BS, sum(len(row) - 1 for row in rows))


class CaptionDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of image (uint8 [3, H, W]) and tokens (int64, begin ... end); item ``i`` is the same in every run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        captions: Sequence[str],
        image: Callable[[int], Tensor],
        *,
        max_positions: int,
        place: str,
    ) -> None:
        """Tokenize all captions; leave out and count those that are empty or need more than ``max_positions``.

        Raises ValueError, naming the ``place`` that they are from, when no example is left.
        """
        self._image = image
        self._ids = load_tokens(captions, tokenizer)
        ends = np.flatnonzero(self._ids == END)
        # A caption of n tokens is begin + n + end: n + 1 positions are read, n + 1 predicted.
        positions = np.diff(ends, prepend=-1)
        empty, too_long = positions == 1, positions > max_positions
        counts = {"empty caption": int(empty.sum()), "caption too long": int(too_long.sum())}
        self.skipped = {reason: count for reason, count in counts.items() if count}
        """Examples left out, by reason."""
        self._kept = np.flatnonzero(~(empty | too_long))
        if not len(self._kept):
            raise ValueError(f"{place} holds no usable example ({self.skipped})")
        self._ends, self.lengths = ends[self._kept] + 1, positions[self._kept]
        """Where the tokens of each example end; and the text positions that the model computes for it."""

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        end, count = int(self._ends[index]), int(self.lengths[index])
        tokens = np.concatenate(([BEGIN], self._ids[end - count : end]), dtype=np.int64)
        return self._image(int(self._kept[index])), torch.from_numpy(tokens)


class CaptionDataModule(ResumableDataModule):
    """Loads batches of images and captions, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer

    def open(self) -> None:
        size, data = self.task.size, self.task.data
        train, val = (data.split(name, seed=self.seed, image_size=size.image_size) for name in ("train", "val"))
        self.tokenizer = load_tokenizer(train[0], vocabulary_size=size.vocabulary_size)
        self.collate = partial(collate, pad_to=data.pad_to)
        most = size.max_tokens if data.pad_to is None else data.pad_to
        self.train_set, self.val_set = (
            CaptionDataset(self.tokenizer, *split, max_positions=most, place=f"{data.place()} ({name})")
            for name, split in (("train", train), ("val", val))
        )
