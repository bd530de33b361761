"""Masked batch: rows of tokens of which some are hidden, masked anew in every batch.

Shape letters: B batch, S positions, T tokens of all rows, one after the other, or some of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.data.tokenizer import PAD, SPECIAL_TOKENS
from tasks.models.class_scores import IGNORED

MASKED, REPLACED = 0.8, 0.1
"""Of the tokens to predict, the shares that show the mask and a random token; the rest show themselves."""


class MaskedBatch(NamedTuple):
    """What the loader yields and the module takes."""

    tokens: Tensor
    """int64 [B, S]: what the model reads, then padding."""
    targets: Tensor
    """int64 [B, S]: the tokens to predict; ``IGNORED`` at all others."""
    mask: Tensor | None
    """bool [B, S]: true at tokens, false at padding; None where rows are packed full."""
    useful_tokens: int
    """Positions that are not padding."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens",)


@dataclass(kw_only=True, slots=True)
class CollateMasked:
    """Make a batch of rows of tokens, masked as BERT was (Devlin et al. 2018, section 3.1).

    What is masked is drawn from the seed and from the rows that came together, in their order: a row is masked anew in
    each epoch, as it then comes with others, while a resumed run and any number of worker processes mask alike, and
    every validation as the one before. A row that comes alone (a batch of one) is masked alike every time.
    """

    seed: int
    """Of the run."""
    share: float
    """Share of a row's ordinary tokens to predict, at least one of them."""
    mask_token: int
    """Id that stands for a hidden token."""
    token_count: int
    """Tokens of the tokenizer; the ordinary ones among them replace others at random."""
    pad_to: int | None
    """Positions of every batch; None: as many as the longest row has."""
    padded: bool
    """Whether rows may be padded: the batch then says where."""

    def __call__(self, rows: Sequence[Tensor]) -> MaskedBatch:
        """Mask and pad int64 rows [length]."""
        lengths = np.array([len(row) for row in rows])
        tokens_T = torch.cat(list(rows)).numpy()
        # numpy: several times as fast as torch on arrays of this size, and a batch has to be ready in milliseconds.
        generator = np.random.default_rng((self.seed, zlib.crc32(tokens_T.tobytes())))
        picked_T = self._pick(tokens_T, lengths, generator)
        targets_T = tokens_T[picked_T]
        draw_T = generator.random(len(targets_T), dtype=np.float32)
        random_T = generator.integers(len(SPECIAL_TOKENS), self.token_count, len(targets_T))
        shown_T = np.where(draw_T < MASKED, self.mask_token, targets_T)
        tokens_T[picked_T] = np.where((draw_T >= MASKED) & (draw_T < MASKED + REPLACED), random_T, shown_T)
        width = int(lengths.max()) if self.pad_to is None else self.pad_to
        mask_BS = np.arange(width) < lengths[:, None]
        tokens_BS = np.full(mask_BS.shape, PAD, dtype=np.int64)
        tokens_BS[mask_BS] = tokens_T
        targets_BS = np.full(mask_BS.shape, IGNORED, dtype=np.int64)
        targets_BS.reshape(-1)[np.flatnonzero(mask_BS)[picked_T]] = targets_T
        mask = torch.from_numpy(mask_BS) if self.padded else None
        return MaskedBatch(torch.from_numpy(tokens_BS), torch.from_numpy(targets_BS), mask, len(tokens_T))

    def _pick(
        self, tokens_T: NDArray[np.int64], lengths: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Where tokens are to be predicted, ascending: the rounded share of each row, at least one."""
        # A random order in which special tokens come last; each row takes its first ones.
        order_T = generator.random(len(tokens_T), dtype=np.float32)
        special_T = tokens_T < len(SPECIAL_TOKENS)
        order_T[special_T] = 2.0
        begins = lengths.cumsum() - lengths
        ordinary_B = lengths - np.add.reduceat(special_T, begins, dtype=np.int64)
        picked = []
        for begin, length, ordinary in zip(begins.tolist(), lengths.tolist(), ordinary_B.tolist(), strict=True):
            count = min(ordinary, max(1, round(self.share * ordinary)))
            if count:
                picked.append(begin + order_T[begin : begin + length].argpartition(count - 1)[:count])
        return np.sort(np.concatenate(picked)) if picked else np.empty(0, dtype=np.int64)
