"""Caption data set: examples with their tokens, minus those that cannot be used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tasks.data.captions import Examples
from tasks.data.image_files import ImageError
from tasks.data.tokenizer import BEGIN, END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_SUBSTITUTIONS = 50
"""Bad images in a row after which a folder is taken to be unusable."""


class CaptionDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of image (uint8 [3, H, W]) and tokens (int64, begin ... end); item ``i`` is the same in every run."""

    def __init__(self, examples: Examples, tokenizer: Tokenizer, *, max_positions: int) -> None:
        """Tokenize all captions; leave out and count those that are empty or need more than ``max_positions``.

        Raises ValueError when no example is left.
        """
        self._examples = examples
        self._left_out = dict(examples.skipped)
        encodings = tokenizer.encode_batch_fast(examples.captions)
        lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
        # A caption of n tokens is begin + n + end: n + 1 positions are read, n + 1 predicted.
        empty, too_long = lengths == 0, lengths + 1 > max_positions
        self._count("empty caption", int(empty.sum()))
        self._count("caption too long", int(too_long.sum()))
        self._kept = np.flatnonzero(~(empty | too_long))
        if not len(self._kept):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self._left_out.items()) or "it is empty"
            raise ValueError(f"{examples.place} holds no usable example ({reasons})")
        # Flat arrays instead of a list of lists: forked workers share their pages, because no reference count changes.
        kept = [encodings[index].ids for index in self._kept]
        self._ends = np.cumsum([len(ids) for ids in kept])
        self._ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in kept])
        # In shared memory, so that the main process sees what worker processes found.
        self._undecodable = torch.zeros(len(examples.captions), dtype=torch.uint8).share_memory_()
        self._image_ids = np.arange(len(lengths)) if examples.image_ids is None else np.array(examples.image_ids)

    def _count(self, reason: str, count: int) -> None:
        if count:
            self._left_out[reason] = self._left_out.get(reason, 0) + count

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Text positions that the model computes for each example: one more than the caption has tokens."""
        return np.diff(self._ends, prepend=0) + 1

    @property
    def skipped(self) -> dict[str, int]:
        """Items left out so far, by reason; images that do not decode are found as they are read."""
        undecodable = int(self._undecodable.sum())
        return {**self._left_out, **({"image does not decode": undecodable} if undecodable else {})}

    def __len__(self) -> int:
        """Usable examples."""
        return len(self._kept)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return example ``index``, or the next one whose image decodes."""
        attempts = min(MOST_SUBSTITUTIONS, len(self._kept))
        for offset in range(attempts):
            position = (index + offset) % len(self._kept)
            example = int(self._kept[position])
            image_id = int(self._image_ids[example])
            if self._undecodable[image_id]:
                continue
            try:
                image = self._examples.image(example)
            except ImageError as error:
                self._undecodable[image_id] = 1
                print(f"left out: {error}", file=sys.stderr, flush=True)
                continue
            return image, self._tokens(position)
        raise ValueError(f"{self._examples.place}: {attempts} examples in a row have images that do not decode")

    def _tokens(self, position: int) -> Tensor:
        end = int(self._ends[position])
        start = int(self._ends[position - 1]) if position else 0
        tokens = torch.empty(end - start + 2, dtype=torch.long)
        tokens[0], tokens[-1] = BEGIN, END
        tokens[1:-1] = torch.from_numpy(self._ids[start:end])
        return tokens
