"""Generated batch: what every micro model takes, and how its random numbers are drawn.

Shape letters: B batch, S positions, ... the shape of an input.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor


class GeneratedBatch(NamedTuple):
    """What the module takes."""

    inputs: Tensor
    """float32 [B, ...], images in channels_last memory; or tokens, int64 [B, S]. See ``GeneratedTensors`` for what a
    loader yields."""
    targets: Tensor
    """Class of each input, or of each position of it: int64 [B] or [B, S]; padding is ignored."""
    useful_tokens: int | None
    """Positions that are not padding; None where inputs are no sequences."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens",)


def generator(key: str) -> torch.Generator:
    """A generator of random numbers for ``key``, the same in every process (``hash()`` is not)."""
    return torch.Generator().manual_seed(seed_of(key))


def seed_of(key: str) -> int:
    """The seed for ``key``."""
    return zlib.crc32(key.encode())
