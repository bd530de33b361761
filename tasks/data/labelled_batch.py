"""Batch of images with their classes.

Shape letters: B batch, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ImageBatch(NamedTuple):
    """What the loader yields and the module takes."""

    images: Tensor
    """uint8 [B, 3, H, W]: a quarter of the bytes of float32 on their way to the device, where they are normalised."""
    targets: Tensor
    """int64 [B]: the class of each image."""


def collate(items: Sequence[tuple[Tensor, int]]) -> ImageBatch:
    """Make a batch of (image uint8 [3, H, W], class) pairs."""
    images, labels = zip(*items, strict=True)
    return ImageBatch(torch.stack(images), torch.tensor(labels, dtype=torch.long))
