"""Image classification: name what an image shows, with any network of torchvision or timm.

Labelled images are drawn shapes, or any data set of torchvision, a folder of images among them.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, Loading, TrainedTask, held_out, require_fields, require_share, suggest

if TYPE_CHECKING:
    import lightning
    from torch import Tensor

    from tasks.image_classification.model import ClassifierNet
    from tasks.module import ScoredModule


VAL_NAMES = ("val", "valid", "validation", "test")
"""Folders, and names of a data set's ``split``, of validation images; the first one that exists."""


@dataclass(kw_only=True, slots=True)
class LabelledExamples:
    """One split."""

    count: int
    """Examples."""
    item: Callable[[int], tuple[Tensor, int]]
    """Index of an example to its uint8 image [3, H, W] and its class; raises ``ImageError`` for an image that does
    not decode."""
    place: str
    """Where the examples come from, for messages: a folder or a name."""


@dataclass(kw_only=True, slots=True)
class LabelledData(Loading):
    """Base of every source of labelled images."""

    def class_names(self) -> list[str]:
        """Classes of the data; the label of an image is the index of its class.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        """List training and validation examples with images of ``image_size`` pixels square.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
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
    None: all differ, each is drawn whenever it is asked for."""

    def __post_init__(self) -> None:
        LabelledData.__post_init__(self)
        require_fields("task.data", self, train_images=1, val_images=1, distinct=1)

    def class_names(self) -> list[str]:
        from tasks.images import shape_classes

        return shape_classes()

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        from tasks.images import KeptImages, Scenes

        train, val = (
            Scenes(key=f"{seed}/{split}", max_objects=1, image_size=image_size).labelled_image
            for split in ("train", "val")
        )
        if self.distinct is not None:
            train = KeptImages(train, count=min(self.distinct, self.train_images), image_size=image_size)
        place = "the embedded shapes"
        return (
            LabelledExamples(count=self.train_images, item=train, place=place),
            LabelledExamples(count=self.val_images, item=val, place=place),
        )


@dataclass(kw_only=True, slots=True)
class TorchvisionDataset(LabelledData):
    """A data set of ``torchvision.datasets`` with an image and a class number an example: a folder of images, ..."""

    dataset: str = "ImageFolder"
    """Class name: ``CIFAR10``, ``Flowers102``, ... ``ImageFolder``: images of ``root/train/<class>/`` and
    ``root/val/<class>/``, or of ``root/<class>/`` with a share held out."""
    root: str = ""
    """Folder of the data set, as its class wants it."""
    download: bool = False
    """Whether its class may download what is missing; nothing is downloaded otherwise."""
    val_share: float = 0.02
    """Share of the images held out for validation where nothing else has them; the same images in every run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class: ``'+task.data.options={split:trainval}'``, of which a share is held out."""

    def __post_init__(self) -> None:
        LabelledData.__post_init__(self)
        require_share("task.data.val_share", self.val_share, below_one=True)

    def class_names(self) -> list[str]:
        """Classes by the data set's own names. Raises ValueError where it has none."""
        names = getattr(self._open(self._arguments()[0]), "classes", None)
        if not names:
            raise ValueError(f"task.data.dataset={self.dataset} does not name its classes: set task.classes")
        return [str(name) for name in names]

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        arguments, tried = self._arguments()
        train = val = self._open(arguments)
        for each in tried:
            try:
                val = self._open(each)
                break
            except ValueError:
                if each is tried[-1]:
                    raise
        indices = list(range(len(train)))
        held = list(range(len(val)))
        if val is train:
            # By class and name: the files of every class may be called 0001.jpg, 0002.jpg, ...
            files = getattr(train, "samples", None)
            names = {i: f"{train.classes[files[i][1]]}/{Path(files[i][0]).name}" if files else str(i) for i in indices}
            out = held_out(names, share=self.val_share)
            indices, held = [i for i in indices if i not in out], sorted(out)
        elif getattr(train, "classes", None) != getattr(val, "classes", None):
            raise ValueError(f"{self.dataset} in {self.root}: training and validation images are of different classes")
        return self._examples(train, indices, image_size), self._examples(val, held, image_size)

    def _examples(self, dataset: Any, indices: list[int], image_size: int) -> LabelledExamples:
        place = f"{self.dataset} in {self.root}" if self.root else self.dataset
        return LabelledExamples(count=len(indices), item=DatasetItems(dataset, indices, image_size, place), place=place)

    def _arguments(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Arguments of the class for training images, and those to try for validation images; none: a share of them."""
        known = inspect.signature(_dataset_class(self.dataset)).parameters
        given: dict[str, Any] = {}
        if "root" in known:
            if not self.root:
                raise ValueError(f"task.data.root='' must name the folder of {self.dataset}")
            given["root"] = self.root
        if "download" in known:
            given["download"] = self.download
        elif self.download:
            raise ValueError(f"task.data.download=true: torchvision cannot download {self.dataset}; see its page")
        given |= self.options
        if self.dataset == "ImageFolder":
            train, *others = (Path(self.root, name) for name in ("train", *VAL_NAMES))
            if not train.is_dir():
                return given, []
            found = [folder for folder in others if folder.is_dir()]
            return {**given, "root": str(train)}, [{**given, "root": str(folder)} for folder in found[:1]]
        if "train" in known:
            return {**given, "train": True}, [{**given, "train": False}]
        if "split" in known and "split" not in given:
            return {**given, "split": "train"}, [{**given, "split": name} for name in VAL_NAMES]
        return given, []

    def _open(self, arguments: dict[str, Any]) -> Any:
        try:
            return _open_dataset(self.dataset, json.dumps(arguments, sort_keys=True))
        except Exception as error:  # classes raise RuntimeError, FileNotFoundError, ModuleNotFoundError, ...
            shown = " ".join(f"{name}={value!r}" for name, value in arguments.items())
            reason = (str(error).strip().partition("\n")[0] or type(error).__name__).replace(
                "download=True", "task.data.download=true"
            )
            raise ValueError(f"task.data.dataset={self.dataset} cannot be opened with {shown}: {reason}") from None


@dataclass(frozen=True, slots=True)
class DatasetItems:
    """Example index to image and class."""

    dataset: Any
    indices: list[int]
    image_size: int
    place: str

    def __call__(self, index: int) -> tuple[Tensor, int]:
        """Take example ``index``; raises ImageError for an image that does not decode."""
        from PIL import Image

        from tasks.images import ImageError, fit_image, read_image

        number = self.indices[index]
        if files := getattr(self.dataset, "samples", None):  # of a folder: read by us, at a fraction of a JPEG's size
            path, label = files[number]
            return read_image(Path(path), image_size=self.image_size), label
        try:
            image, label = self.dataset[number][:2]
            if isinstance(image, Image.Image):
                image = fit_image(image, image_size=self.image_size)
        except Exception as error:  # PIL's plug-ins raise many kinds on broken files
            raise ImageError(f"{self.place}: example {index} does not decode ({type(error).__name__})") from None
        if not hasattr(image, "shape") or not hasattr(label, "__index__"):
            kinds = f"{type(image).__name__} and {type(label).__name__}"
            raise ValueError(f"{self.place}: an example is {kinds}, not an image and a class number")
        return image, int(label)


def _dataset_class(name: str) -> type:
    from torchvision import datasets

    known = {each: kind for each, kind in vars(datasets).items() if each in datasets.__all__ and inspect.isclass(kind)}
    if name not in known:
        raise ValueError(f"task.data.dataset={name!r} is not a class of torchvision.datasets{suggest(name, known)}")
    kind: type = known[name]
    return kind


@functools.lru_cache(maxsize=4)
def _open_dataset(name: str, arguments: str) -> Any:
    """Open a data set once: the network asks for its classes before training asks for its images."""
    return _dataset_class(name)(**json.loads(arguments))


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
        from tasks.image_classification.model import ClassifierNet, build_model

        model = build_model(self.model, classes=self.class_count(), image_size=self.image_size)
        return ClassifierNet(model, channels_last=self.channels_last, label_smoothing=self.label_smoothing)

    def module_class(self) -> type[ScoredModule]:
        from tasks.image_classification.model import ImageClassifier

        return ImageClassifier

    def default_learning_rate(self) -> float:
        """Networks without batch norm (transformers, AlexNet) diverge at the rates that ResNets like."""
        from tasks.image_classification.model import has_batch_norm, skeleton

        model = skeleton(self.model, classes=self.class_count(), image_size=self.image_size)
        return 1e-3 if has_batch_norm(model) else 3e-4

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with what is around them apart.

        A network in which nothing repeats has no blocks to share: it is one region, under ``regional`` too.
        """
        from tasks.image_classification.model import find_blocks, find_parts, skeleton

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
        from tasks.image_classification.model import ClassifierNet, skeleton

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
