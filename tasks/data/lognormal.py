"""Lognormal: captions without meaning whose lengths follow a lognormal distribution, to measure ragged batches with."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.checks import require_at_least
from tasks.data.captions import CaptionData, Examples
from tasks.room import LEAST_OF_EXAMPLE, require_memory

if TYPE_CHECKING:
    from torch import Tensor

WORDS = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeio", "rstvz", "uy")]
"""Each becomes one token once the tokenizer has a few thousand."""


@dataclass(kw_only=True, slots=True)
class Lognormal(CaptionData):
    """Noise with captions of lognormal lengths, as the documents and sentences of real corpora have them.

    What a model can learn from them is the order of words within a caption. Example ``i`` depends on the seed and
    ``i`` alone.
    """

    train_images: int = 16384
    """Training examples."""
    val_images: int = 256
    """Validation examples; none of them is a training example."""
    median: float = 60.0
    """Median length in text positions."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of the length; 0 = all of one length."""
    shortest: int = 4
    """Positions of the shortest caption; what would be shorter gets this length."""
    longest: int = 256
    """Positions of the longest caption; what would be longer gets this length."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        CaptionData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_at_least("task.data.train_images", self.train_images, 1)
        require_at_least("task.data.val_images", self.val_images, 1)
        require_at_least("task.data.median", self.median, 1)
        require_at_least("task.data.sigma", self.sigma, 0)
        require_at_least("task.data.shortest", self.shortest, 2)
        require_at_least("task.data.longest", self.longest, self.shortest)

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """Training and validation examples."""
        given = f"task.data.train_images={self.train_images}, task.data.val_images={self.val_images}"
        require_memory(given, LEAST_OF_EXAMPLE * (self.train_images + self.val_images))
        train = self._examples(f"{seed}/train", self.train_images, image_size)
        return train, self._examples(f"{seed}/val", self.val_images, image_size)

    def _examples(self, key: str, count: int, image_size: int) -> Examples:
        return Examples(
            captions=[self._caption(f"{key}/{index}") for index in range(count)],
            image=Noise(key, image_size),
            place="captions of lognormal lengths",
        )

    def _caption(self, key: str) -> str:
        draw = random.Random(key)
        positions = round(draw.lognormvariate(0.0, self.sigma) * self.median)
        words = min(max(positions, self.shortest), self.longest) - 1  # and the end
        start, stride = draw.randrange(len(WORDS)), draw.randrange(1, 8)
        return " ".join(WORDS[(start + stride * index) % len(WORDS)] for index in range(words))


@dataclass(frozen=True, slots=True)
class Noise:
    """Images of random pixels."""

    key: str
    size: int

    def __call__(self, index: int) -> Tensor:
        """uint8 [3, size, size], the same at every call with ``index``."""
        import torch

        # Not hash(): that differs from process to process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.key}/{index}".encode()))
        return torch.randint(0, 256, (3, self.size, self.size), dtype=torch.uint8, generator=generator)
