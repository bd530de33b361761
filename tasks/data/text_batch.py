"""Text batch: rows of tokens, right-padded, with a count that is known without reading device memory.

Shape letters: B batch, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.data.tokenizer import PAD


class TextBatch(NamedTuple):
    """What the loader yields and the module takes."""

    tokens: Tensor
    """int64 [B, S]. The model reads S - 1 positions, all but the last, and predicts all tokens but the first."""
    useful_tokens: int
    """Targets that are not padding."""

    @property
    def inputs(self) -> Tensor:
        """int64 [B, S - 1], contiguous, so that no compiled region sees strides that depend on the length."""
        return self.tokens[:, :-1].contiguous()

    @property
    def targets(self) -> Tensor:
        """int64 [B, S - 1], the token after each of ``inputs``."""
        return self.tokens[:, 1:].contiguous()

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens",)


@dataclass(kw_only=True, slots=True)
class CollateText:
    """Make a batch of rows of tokens."""

    pad_to: int | None
    """Positions of every batch; None: as many as the longest row needs."""

    def __call__(self, rows: Sequence[Tensor]) -> TextBatch:
        """Pad int64 rows [length]."""
        lengths = [len(row) for row in rows]
        return TextBatch(
            pad_rows(rows, width=None if self.pad_to is None else self.pad_to + 1), sum(lengths) - len(lengths)
        )


def pad_rows(rows: Sequence[Tensor], *, width: int | None) -> Tensor:
    """Stack int64 rows [length] as [B, S], padded on the right to ``width`` tokens or to the longest row's."""
    lengths = [len(row) for row in rows]
    width = max(lengths) if width is None else width
    if min(lengths) == width:
        return torch.stack(list(rows))
    padded_BS = torch.full((len(rows), width), PAD, dtype=torch.long)
    for row_S, row in zip(padded_BS, rows, strict=True):
        row_S[: len(row)] = row
    return padded_BS
