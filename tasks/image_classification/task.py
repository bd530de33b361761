"""Image classification: name what an image shows, with any network of torchvision or timm.

Labelled images are drawn shapes, or a folder of images.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, Loading, TrainedTask, require_fields

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from tasks.image_classification.model import ClassifierNet
    from tasks.lightning_module import ScoredModule

    Labelled = tuple[Tensor, int]


@dataclass(kw_only=True, slots=True)
class LabelledData(Loading):
    """Base of every source of labelled images."""

    def class_count(self) -> int:
        """Classes of the data. Raises ValueError, naming the file, for what cannot be used; so does ``sets``."""
        raise NotImplementedError

    def sets(self, *, seed: int, image_size: int) -> tuple[Dataset[Labelled], Dataset[Labelled]]:
        """Training and validation images, uint8 [3, ``image_size``, ``image_size``], each with its class."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class LabelledShapes(LabelledData):
    """The embedded data set: scenes of one shape drawn by code, in 30 classes of kind and colour.

    Scene ``i`` depends on the seed and ``i`` alone.
    """

    train_images: int = 16384
    """Training images."""
    val_images: int = 256
    """Validation images; none of them is a training image."""
    distinct: int | None = None
    """Different training images: image ``i`` is image ``i % distinct`` once more. They are drawn once and kept in
    memory (3 bytes a pixel), so that loading does not hold up a GPU; what is learned is then those images.
    null = all differ, each is drawn whenever it is asked for."""

    def __post_init__(self) -> None:
        LabelledData.__post_init__(self)
        require_fields("task.data", self, train_images=1, val_images=1, distinct=1)

    def class_count(self) -> int:
        from tasks.images import COLOURS, SHAPES

        return len(SHAPES) * len(COLOURS)

    def sets(self, *, seed: int, image_size: int) -> tuple[Dataset[Labelled], Dataset[Labelled]]:
        from tasks.images import LabelledScenes

        train = LabelledScenes(f"{seed}/train", self.train_images, image_size=image_size, distinct=self.distinct)
        return train, LabelledScenes(f"{seed}/val", self.val_images, image_size=image_size)


@dataclass(kw_only=True, slots=True)
class ImageFolder(LabelledData):
    """Images of ``root/train/<class>/`` and ``root/val/<class>/``, by ``torchvision.datasets.ImageFolder``."""

    source: ClassVar[str] = "root"
    root: str = ""
    """The folder."""

    def class_count(self) -> int:
        from torchvision.datasets.folder import find_classes

        return len(self._listed(find_classes, "train")[0])

    def sets(self, *, seed: int, image_size: int) -> tuple[Dataset[Labelled], Dataset[Labelled]]:
        from torchvision.datasets import ImageFolder as Folder

        from tasks.images import read_image

        folder = functools.partial(Folder, loader=functools.partial(read_image, image_size=image_size))
        train, val = (self._listed(folder, split) for split in ("train", "val"))
        if val.classes != train.classes:
            raise ValueError(f"{self.root}: training and validation images are of different classes")
        return train, val

    def _listed(self, read: Callable[[str], Any], split: str) -> Any:
        try:
            return read(os.path.join(self.root, split))
        except OSError as error:
            raise ValueError(f"{self.place()}: {str(error).strip().partition(chr(10))[0]}") from None


@dataclass(kw_only=True, slots=True)
class ImageClassification(TrainedTask):
    """Image classification: the cross entropy of one class an image, random weights at the start."""

    name: ClassVar[str] = "image_classification"
    inputs: ClassVar[tuple[str, ...]] = ("images", "targets")

    model: str = "resnet18"
    """Any classification network of torchvision by name (``resnet50``, ``vit_l_16``, ``alexnet``, ...), ``vit_ti_16``,
    ``vit_s_16``, or ``timm/<name>`` with timm installed."""
    image_size: int = 64
    """Width and height of an image, pixels."""
    classes: int | None = None
    """Outputs of the network, at least the classes of the data; null = as many."""
    data: LabelledData = field(default_factory=LabelledShapes)
    """Labelled images: the embedded shapes or a folder."""

    def __post_init__(self) -> None:
        TrainedTask.__post_init__(self)
        require_fields("task", self, image_size=1, classes=1)

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.image_classification.model import LabelledDataModule

        return LabelledDataModule(self, seed=seed)

    def build_module(self, *, max_steps: int) -> ScoredModule:
        """Build the module. Raises ValueError for an unknown network and for images that it cannot take."""
        from tasks.lightning_module import operations

        self.skeleton()  # raises by itself for an unknown name
        try:
            operations(self)
        except (AssertionError, RuntimeError, ValueError) as error:  # too small an image stops here, not the first step
            reason = str(error).partition("\n")[0]
            raise ValueError(f"task.image_size={self.image_size}: {self.model} cannot take it ({reason})") from None
        return TrainedTask.build_module(self, max_steps=max_steps)

    def build_net(self) -> ClassifierNet:
        from tasks.image_classification.model import ClassifierNet, build_model

        return ClassifierNet(build_model(self.model, classes=self.class_count(), image_size=self.image_size))

    def default_learning_rate(self) -> float:
        """Networks without batch norm (transformers, AlexNet) diverge at the rates that ResNets like."""
        from torch import nn

        return 1e-3 if any(isinstance(module, nn.BatchNorm2d) for module in self.skeleton().modules()) else 3e-4

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with what is around them apart.

        A network in which nothing repeats has no blocks to share: it is one region, under ``regional`` too.
        """
        from tasks.image_classification.model import find_blocks

        blocks = find_blocks(self.skeleton())
        if not blocks:
            return Declaration(whole=("net",), blocks=("net",), parts=("net",))
        paths = tuple(f"net.model.{path}" for path in blocks)
        return Declaration(whole=("net",), blocks=paths, parts=("net.stem", "net.tail"))

    def count(self, batch: Any) -> BatchCounts:
        return BatchCounts(samples=batch.targets.shape[0])

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        images = torch.zeros(rows, 3, self.image_size, self.image_size, dtype=torch.uint8)
        return images, torch.zeros(rows, dtype=torch.long)

    def skeleton(self) -> nn.Module:
        """What the network is like, without memory; it is built once and not to be changed."""
        from tasks.image_classification.model import skeleton

        return skeleton(self.model, classes=self.class_count(), image_size=self.image_size)

    def counted_net(self) -> nn.Module:
        from tasks.image_classification.model import ClassifierNet
        from tasks.lightning_module import on_meta

        return on_meta(functools.partial(ClassifierNet, self.skeleton()))

    def class_count(self) -> int:
        """Outputs of the network; the data module refuses fewer than the data's classes."""
        return self.classes or self.data.class_count()
