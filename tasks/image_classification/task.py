"""Image classification: name what an image shows, with any network of torchvision or timm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, TrainedTask, require_at_least, require_share
from tasks.image_classification.sources import LabelledData, LabelledShapes

if TYPE_CHECKING:
    import lightning

    from tasks.image_classification.model import ClassifierNet


@dataclass(kw_only=True, slots=True)
class ImageClassification(TrainedTask):
    """Image classification: the cross entropy of one class an image, random weights at the start."""

    name: ClassVar[str] = "image_classification"
    monitor: ClassVar[str | None] = "val/loss"

    model: str = "resnet18"
    """Any classification network of torchvision by name (``resnet50``, ``vit_l_16``, ``alexnet``, ...), ``vit_ti_16``,
    ``vit_s_16``, or ``timm/<name>`` with timm installed."""
    image_size: int = 64
    """Width and height of an image, pixels."""
    classes: int | None = None
    """Outputs of the network, at least the classes of the data; None: as many."""
    channels_last: bool | None = None
    """Memory format of images and convolutions; None: channels last where the network is convolutional."""
    label_smoothing: float = 0.0
    """Share of each target spread over all classes, in training."""
    data: LabelledData = field(default_factory=LabelledData)
    """Labelled images: the embedded shapes (also where only the base is given), a folder or a torchvision data set."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        if type(self.data) is LabelledData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = LabelledShapes(**asdict(self.data))
        TrainedTask.__post_init__(self)
        require_at_least("task.image_size", self.image_size, 1)
        require_at_least("task.classes", self.classes, 1)
        require_share("task.label_smoothing", self.label_smoothing, below_one=True)

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module. Raises ValueError, naming the file, for unusable input."""
        from tasks.image_classification.data import LabelledDataModule

        return LabelledDataModule(self.data, image_size=self.image_size, classes=self._class_count(), seed=seed)

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module; see ``initialise`` for its weights.

        Raises ValueError for an unknown network and for images that it cannot take.
        """
        from tasks.image_classification.library import skeleton
        from tasks.image_classification.model import ImageClassifier, has_batch_norm

        self._count_flops(self.data.batch_size, training=True)  # too small an image stops here, not in the first step
        classes = self._class_count()
        # Networks without batch norm (transformers, AlexNet) diverge at the rates that ResNets like.
        rate = 1e-3 if has_batch_norm(skeleton(self.model, classes=classes, image_size=self.image_size)) else 3e-4
        recipe = self.recipe(default_learning_rate=rate, max_steps=max_steps)
        return ImageClassifier(partial(self._build, classes), recipe, initialise=self.initialise)

    def _build(self, classes: int) -> ClassifierNet:
        from tasks.image_classification.library import build_model
        from tasks.image_classification.model import ClassifierNet

        model = build_model(self.model, classes=classes, image_size=self.image_size)
        return ClassifierNet(model, channels_last=self.channels_last, label_smoothing=self.label_smoothing)

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with what is around them apart.

        A network in which nothing repeats has no blocks to share: it is one region, under ``regional`` too.
        """
        from tasks.image_classification.library import find_blocks, find_parts, skeleton

        # The number of classes does not matter here, and the data need not be looked at for it.
        model = skeleton(self.model, classes=self.classes or 1, image_size=self.image_size)
        blocks = find_blocks(model)
        if not blocks:
            return Declaration(whole=("net",), blocks=("net",), parts=("net",))
        parts = [f"net.model.{path}" for path in find_parts(model, blocks)]
        return Declaration(
            whole=("net",),
            blocks=tuple(f"net.model.{path}" for path in blocks),
            parts=("net.stem", *parts, "net.tail"),
        )

    def count(self, batch: Any) -> BatchCounts:
        """Count the images of an ImageBatch."""
        return BatchCounts(samples=batch.targets.shape[0])

    def training_flops(self, batch: Any) -> int | None:
        """Floating-point operations of forward and backward; None for a network that cannot be counted."""
        return self._count_flops(batch.targets.shape[0], training=True)

    def inference_flops(self, batch: Any) -> int | None:
        """Floating-point operations of the forward alone; None for a network that cannot be counted."""
        return self._count_flops(batch.targets.shape[0], training=False)

    def _count_flops(self, batch_size: int, *, training: bool) -> int | None:
        from tasks.image_classification.library import count_flops

        return count_flops(
            self.model,
            classes=self._class_count(),
            image_size=self.image_size,
            batch_size=batch_size,
            training=training,
        )

    def _class_count(self) -> int:
        """Outputs of the network. Raises ValueError for fewer than the data's classes."""
        if self.classes is not None and type(self.data) is not LabelledShapes:
            return self.classes  # the data need not be opened; each label is compared as it is read
        found = len(self.data.class_names())
        if self.classes is None:
            return found
        if self.classes < found:
            raise ValueError(f"task.classes={self.classes} must be at least {found}, the classes of the data")
        return self.classes
