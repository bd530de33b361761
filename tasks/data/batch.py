"""Batch: images and right-padded captions, with counts that are known without reading device memory.

Shape letters: B batch, H height, W width, S tokens of the longest caption (begin and end included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.data.tokenizer import PAD


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
