"""Text data set: rows of tokens, packed full or one document each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tasks.data.text import Documents
from tasks.data.text_tokens import load_tokens
from tasks.data.tokenizer import BEGIN, END

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextDataset(Dataset[Tensor]):
    """Rows of tokens, int64 [length]; item ``i`` is the same in every run."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        packing: str,
        positions: int,
        extra: int,
        folder: Path,
    ) -> None:
        """Tokenize all documents and lay out the rows.

        Args:
            documents: What to tokenize.
            tokenizer: Its ``BEGIN`` and ``END`` mark documents.
            packing: ``packed``: documents one after the other, each with its end, cut into rows of ``positions``;
                what is left at the end makes no row. ``documents``: a row is begin, document, end, cut to
                ``positions``.
            positions: Most positions that the model computes for a row.
            extra: Tokens of a row beyond its positions: 1 where the model predicts the next token.
            folder: Where tokens are kept, see ``load_tokens``.

        Raises:
            ValueError: No row is left.
        """
        self.skipped = dict(documents.skipped)
        self._packed = packing == "packed"
        self._positions, self._extra = positions, extra
        # One flat array instead of a list of lists: forked workers share its pages, as no reference count changes.
        self._ids = load_tokens(documents.texts, tokenizer, folder=folder)
        self._ends = np.flatnonzero(self._ids == END)
        tokens = np.diff(self._ends, prepend=-1) + 1  # begin and end included
        if self._packed:
            self._lengths = np.full((len(self._ids) - extra) // positions, positions, dtype=np.int64)
        else:
            self._lengths = np.minimum(tokens - extra, positions)
            if cut := int((tokens - extra > positions).sum()):
                self.skipped["rest of a document that is too long"] = cut
        if not len(self._lengths):
            raise ValueError(
                f"{documents.place} holds {len(self._ids):,} tokens: too few for a packed row of {positions} positions "
                "(task.data.max_tokens)"
            )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions that the model computes for each row."""
        return self._lengths

    def __len__(self) -> int:
        """Rows."""
        return len(self._lengths)

    def __getitem__(self, index: int) -> Tensor:
        """Return row ``index``."""
        if index >= len(self):
            raise IndexError(index)
        count = int(self._lengths[index]) + self._extra
        if self._packed:
            begin = index * self._positions
            return torch.from_numpy(self._ids[begin : begin + count].astype(np.int64))
        begin = int(self._ends[index - 1]) + 1 if index else 0
        row = torch.empty(count, dtype=torch.long)
        row[0] = BEGIN
        row[1:] = torch.from_numpy(self._ids[begin : begin + count - 1].astype(np.int64))
        return row
