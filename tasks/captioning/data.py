"""Batch: images and right-padded captions, with counts that are known without reading device memory.

Shape letters: B batch, H height, W width, S tokens of the longest caption (begin and end included).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tasks.captioning.sources import CaptionData, Examples
from tasks.images import ImageError
from tasks.loading import ResumableDataModule
from tasks.tokenizer import BEGIN, END, PAD, decode, load_tokenizer

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


@dataclass(kw_only=True, slots=True)
class Collate:
    """Make a batch of (image, tokens) pairs."""

    pad_to: int | None
    """Positions of every batch; None: as many as the longest caption needs."""

    def __call__(self, items: Sequence[tuple[Tensor, Tensor]]) -> CaptionBatch:
        """Stack images uint8 [3, H, W] and pad tokens int64 [length]."""
        lengths = [len(tokens) for _, tokens in items]
        width = max(lengths) if self.pad_to is None else self.pad_to + 1
        padded_BS = torch.full((len(items), width), PAD, dtype=torch.long)
        for row_S, (_, tokens) in zip(padded_BS, items, strict=True):
            row_S[: len(tokens)] = tokens
        return CaptionBatch(torch.stack([image for image, _ in items]), padded_BS, sum(lengths) - len(lengths))


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


class CaptionDataModule(ResumableDataModule):
    """Loads batches of images and captions, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer
    train_set: CaptionDataset
    val_set: CaptionDataset

    def __init__(
        self, config: CaptionData, *, image_size: int, vocabulary_size: int, max_tokens: int, seed: int
    ) -> None:
        """``max_tokens``: text positions that the model takes; ``image_size`` in pixels."""
        super().__init__(config, seed=seed)
        self._config = config
        self._image_size = image_size
        self._vocabulary_size = vocabulary_size
        self._max_positions = max_tokens if config.pad_to is None else min(max_tokens, config.pad_to)
        self.collate = Collate(pad_to=config.pad_to)

    def open(self) -> str:
        """List the examples, load or train the tokenizer and tokenize. Raises ValueError for unusable input."""
        train, val = self._config.splits(seed=self.seed, image_size=self._image_size)
        self.tokenizer = load_tokenizer(
            train.captions, vocabulary_size=self._vocabulary_size, folder=self._config.tokenizer_folder()
        )
        self.train_set = CaptionDataset(train, self.tokenizer, max_positions=self._max_positions)
        self.val_set = CaptionDataset(val, self.tokenizer, max_positions=self._max_positions)
        return train.place

    def transfer_batch_to_device(self, batch: CaptionBatch, device: torch.device, dataloader_idx: int) -> CaptionBatch:
        """Move the two tensors without waiting for the copy; the count stays on the host."""
        return batch._replace(
            images=batch.images.to(device, non_blocking=True), tokens=batch.tokens.to(device, non_blocking=True)
        )

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids up to the first end."""
        return decode(self.tokenizer, tokens)
