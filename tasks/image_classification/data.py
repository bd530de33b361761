"""Batch of images with their classes.

Shape letters: B batch, H height, W width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.image_classification.sources import LabelledData, LabelledExamples
from tasks.images import ImageError
from tasks.loading import ResumableDataModule


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


MOST_SUBSTITUTIONS = 50
"""Bad images in a row after which a source is taken to be unusable."""


class LabelledDataset(Dataset[tuple[Tensor, int]]):
    """Pairs of image (uint8 [3, H, W]) and class; item ``i`` is the same in every run."""

    def __init__(self, examples: LabelledExamples, *, classes: int) -> None:
        """``classes``: labels are below it. Raises ValueError when there is no example."""
        if not examples.count:
            raise ValueError(f"{examples.place} holds no usable example")
        self._examples = examples
        self._classes = classes
        # In shared memory, so that the main process sees what worker processes found.
        self._undecodable = torch.zeros(examples.count, dtype=torch.uint8).share_memory_()

    @property
    def skipped(self) -> dict[str, int]:
        """Items left out so far, by reason."""
        undecodable = int(self._undecodable.sum())
        return {**self._examples.skipped, **({"image does not decode": undecodable} if undecodable else {})}

    def __len__(self) -> int:
        """Examples, those that turn out not to decode included."""
        return self._examples.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return example ``index``, or the next one whose image decodes."""
        attempts = min(MOST_SUBSTITUTIONS, len(self))
        for offset in range(attempts):
            position = (index + offset) % len(self)
            if self._undecodable[position]:
                continue
            try:
                image, label = self._examples.item(position)
            except ImageError as error:
                self._undecodable[position] = 1
                print(f"left out: {error}", file=sys.stderr, flush=True)
                continue
            if not 0 <= label < self._classes:  # on a GPU it would end the process without saying why
                raise ValueError(
                    f"{self._examples.place}: example {position} is of class {label}, not below {self._classes}"
                )
            return image, label
        raise ValueError(f"{self._examples.place}: {attempts} examples in a row have images that do not decode")


class LabelledDataModule(ResumableDataModule):
    """Loads batches of labelled images, in an order that a resumed run continues exactly."""

    train_set: LabelledDataset
    val_set: LabelledDataset

    def __init__(self, config: LabelledData, *, image_size: int, classes: int, seed: int) -> None:
        """``image_size`` in pixels; ``classes``: outputs of the network."""
        super().__init__(config, seed=seed)
        self._config = config
        self._image_size = image_size
        self._classes = classes
        self.collate = collate

    def open(self) -> str:
        """List the examples. Raises ValueError, naming the file, for unusable input."""
        train, val = self._config.splits(seed=self.seed, image_size=self._image_size)
        self.train_set = LabelledDataset(train, classes=self._classes)
        self.val_set = LabelledDataset(val, classes=self._classes)
        return train.place
