"""Labelled images as data sets and batches, from any source of them.

Shape letters: B batch, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tasks.image_classification.task import LabelledExamples
from tasks.images import ImageDataset
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


class LabelledDataset(ImageDataset[tuple[Tensor, int]]):
    """Pairs of image (uint8 [3, H, W]) and class."""

    def __init__(self, examples: LabelledExamples, *, classes: int) -> None:
        """``classes``: labels are below it. Raises ValueError when there is no example."""
        if not examples.count:
            raise ValueError(f"{examples.place} holds no usable example")
        super().__init__(examples.place, images=examples.count)
        self._count, self._item, self._classes = examples.count, examples.item, classes

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[Tensor, int]:
        image, label = self._item(index)
        if not 0 <= label < self._classes:  # on a GPU it would end the process without saying why
            raise ValueError(f"{self.place}: example {index} is of class {label}, not below {self._classes}")
        return image, label


class LabelledDataModule(ResumableDataModule):
    """Loads batches of labelled images, in an order that a resumed run continues exactly."""

    train_set: LabelledDataset
    val_set: LabelledDataset

    def __init__(self, task: ImageClassification, *, seed: int) -> None:
        super().__init__(task.data, seed=seed)
        self._task = task
        self.collate = collate

    def open(self) -> str:
        train, val = self._task.data.splits(seed=self.seed, image_size=self._task.image_size)
        classes = self._task.class_count()
        self.train_set, self.val_set = (LabelledDataset(split, classes=classes) for split in (train, val))
        return train.place
