"""Kept images: a few labelled images, made once, in memory that all loader processes share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MISSING = -1
"""Label of an image that was not made yet."""


class KeptImages:
    """Item ``i`` is item ``i % count`` of ``item``, which is asked for it once.

    Filled as images are asked for, by whichever process is first; two that make the same image write the same bytes.
    """

    def __init__(self, item: Callable[[int], tuple[Tensor, int]], *, count: int, image_size: int) -> None:
        """``count``: different images, 3 bytes a pixel each."""
        self._item = item
        self._images = torch.empty((count, 3, image_size, image_size), dtype=torch.uint8).share_memory_()
        self._labels = torch.full((count,), MISSING, dtype=torch.long).share_memory_()

    def __call__(self, index: int) -> tuple[Tensor, int]:
        """Image (uint8 [3, H, W]; not to be written to) and class."""
        place = index % len(self._images)
        if int(self._labels[place]) == MISSING:
            image, label = self._item(place)
            self._images[place] = image
            self._labels[place] = label  # last: whoever sees it sees the image
        return self._images[place], int(self._labels[place])
