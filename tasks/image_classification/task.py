"""Image classification: name what an image shows, with any network of torchvision or timm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, TrainedTask, require_fields, require_share
from tasks.image_classification.sources import LabelledData, LabelledShapes

if TYPE_CHECKING:
    import lightning
    from torch import Tensor

    from tasks.image_classification.model import ClassifierNet
    from tasks.module import ScoredModule


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
        if type(self.data) is LabelledData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = LabelledShapes(**asdict(self.data))
        TrainedTask.__post_init__(self)
        require_fields("task", self, image_size=1, classes=1)
        require_share("task.label_smoothing", self.label_smoothing, below_one=True)

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.image_classification.data import LabelledDataModule

        return LabelledDataModule(self, seed=seed)

    def build_module(self, *, max_steps: int) -> ScoredModule:
        """Build the module. Raises ValueError for an unknown network and for images that it cannot take."""
        # Too small an image stops here, not in the first step.
        self.count_flops(rows=self.data.batch_size, positions=0, training=True)
        return TrainedTask.build_module(self, max_steps=max_steps)

    def build_net(self) -> ClassifierNet:
        from tasks.image_classification.library import build_model
        from tasks.image_classification.model import ClassifierNet

        model = build_model(self.model, classes=self.class_count(), image_size=self.image_size)
        return ClassifierNet(model, channels_last=self.channels_last, label_smoothing=self.label_smoothing)

    def module_class(self) -> type[ScoredModule]:
        from tasks.image_classification.model import ImageClassifier

        return ImageClassifier

    def default_learning_rate(self) -> float:
        """Networks without batch norm (transformers, AlexNet) diverge at the rates that ResNets like."""
        from tasks.image_classification.library import has_batch_norm, skeleton

        model = skeleton(self.model, classes=self.class_count(), image_size=self.image_size)
        return 1e-3 if has_batch_norm(model) else 3e-4

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
        return BatchCounts(samples=batch.targets.shape[0])

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        images = torch.zeros(rows, 3, self.image_size, self.image_size, dtype=torch.uint8)
        return images, torch.zeros(rows, dtype=torch.long)

    def counted_net(self) -> ClassifierNet:
        """A network that is built once, as it is also looked at for its blocks."""
        from tasks.image_classification.library import skeleton
        from tasks.image_classification.model import ClassifierNet

        model = skeleton(self.model, classes=self.class_count(), image_size=self.image_size)
        return ClassifierNet(model, channels_last=False)

    def count_flops(self, *, rows: int, positions: int, training: bool) -> int | None:
        """Raises ValueError for a batch that the network cannot take."""
        self.counted_net()  # raises by itself for an unknown name
        try:
            return TrainedTask.count_flops(self, rows=rows, positions=positions, training=training)
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"task.image_size={self.image_size} with task.data.batch_size={rows}: {self.model} cannot take it "
                f"({reason})"
            ) from None

    def class_count(self) -> int:
        """Outputs of the network. Raises ValueError for fewer than the data's classes."""
        if self.classes is not None and type(self.data) is not LabelledShapes:
            return self.classes  # the data need not be opened; each label is compared as it is read
        found = len(self.data.class_names())
        if self.classes is None:
            return found
        if self.classes < found:
            raise ValueError(f"task.classes={self.classes} must be at least {found}, the classes of the data")
        return self.classes
