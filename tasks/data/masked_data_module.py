"""Masked data module: rows of tokens of any source of text, some of them hidden."""

from __future__ import annotations

from tasks.data.masked_batch import CollateMasked
from tasks.data.text import TextData
from tasks.data.text_data_module import TextDataModule


class MaskedDataModule(TextDataModule):
    """Loads batches of masked rows, in an order that a resumed run continues exactly."""

    extra = 0

    def __init__(
        self, config: TextData, *, vocabulary_size: int, max_tokens: int, masked_share: float, seed: int
    ) -> None:
        """``vocabulary_size``: of the model; its last id is the mask's and no token of the tokenizer."""
        super().__init__(config, vocabulary_size=vocabulary_size - 1, max_tokens=max_tokens, seed=seed)
        self._mask_token = vocabulary_size - 1
        self._masked_share = masked_share

    def open(self) -> str:
        """Read, tokenize and lay out the rows. Raises ValueError for unusable input."""
        place = super().open()
        self.collate = CollateMasked(
            seed=self.seed,
            share=self._masked_share,
            mask_token=self._mask_token,
            token_count=self.tokenizer.get_vocab_size(),
            pad_to=self._config.pad_to,
            padded=self._config.packing == "documents",
        )
        return place
