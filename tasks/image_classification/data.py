"""Labelled images as batches. Shape letters: B batch, H height, W width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tasks.loading import ResumableDataModule

if TYPE_CHECKING:
    from tasks.image_classification.task import ImageClassification


class ImageBatch(NamedTuple):
    """What the loader yields and the module takes."""

    images: Tensor
    """uint8 [B, 3, H, W]: a quarter of the bytes of float32 on their way to the device, where they are normalised."""
    targets: Tensor
    """int64 [B]: the class of each image."""


def collate(items: Sequence[tuple[Tensor, int]]) -> ImageBatch:
    images, labels = zip(*items, strict=True)
    return ImageBatch(torch.stack(images), torch.tensor(labels, dtype=torch.long))


class LabelledDataModule(ResumableDataModule):
    """Loads batches of labelled images, in an order that a resumed run continues exactly."""

    def __init__(self, task: ImageClassification, *, seed: int) -> None:
        super().__init__(task.data, seed=seed)
        self._task = task
        self.collate = collate

    def open(self) -> str:
        data = self._task.data
        found, outputs = len(data.class_names()), self._task.class_count()
        if found > outputs:  # on a GPU a label beyond them would end the process without saying why
            raise ValueError(f"task.classes={outputs} must be at least {found}, the classes of the data")
        self.train_set, self.val_set = data.sets(seed=self.seed, image_size=self._task.image_size)
        return data.place()
