"""Text data module: tokenizer and rows of tokens of any source of text, for predicting the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.data.resumable import ResumableDataModule
from tasks.data.text import TextData
from tasks.data.text_batch import CollateText
from tasks.data.text_dataset import TextDataset
from tasks.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextDataModule(ResumableDataModule):
    """Loads batches of rows of tokens, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer
    train_set: TextDataset
    val_set: TextDataset
    extra = 1
    """Tokens of a row beyond the positions that the model computes."""

    def __init__(self, config: TextData, *, vocabulary_size: int, max_tokens: int, seed: int) -> None:
        """``max_tokens``: positions that the model takes; ``vocabulary_size``: most tokens that are learned."""
        super().__init__(config, seed=seed)
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._positions = min(value for value in (max_tokens, config.max_tokens, config.pad_to) if value is not None)
        self.collate = CollateText(pad_to=config.pad_to)

    def open(self) -> str:
        """Read the documents, load or train the tokenizer and tokenize. Raises ValueError for unusable input."""
        train, val = self._config.documents(seed=self.seed)
        folder = self._config.tokenizer_folder()
        self.tokenizer = load_tokenizer(train.texts, vocabulary_size=self._vocabulary_size, folder=folder)
        self.train_set, self.val_set = (
            TextDataset(
                documents,
                self.tokenizer,
                packing=self._config.packing,
                positions=self._positions,
                extra=self.extra,
                folder=folder,
            )
            for documents in (train, val)
        )
        return train.place
