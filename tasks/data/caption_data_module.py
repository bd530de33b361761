"""Caption data module: tokenizer and data sets of any source of captioned images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tasks.data.batch import CaptionBatch, Collate
from tasks.data.caption_dataset import CaptionDataset
from tasks.data.captions import CaptionData
from tasks.data.resumable import ResumableDataModule
from tasks.data.tokenizer import decode, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
