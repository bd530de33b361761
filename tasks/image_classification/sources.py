"""Sources of labelled images: drawn shapes, a folder a class, any data set of torchvision."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.base import Loading, held_out, require_fields, require_share, suggest

if TYPE_CHECKING:
    from torch import Tensor

VAL_NAMES = ("val", "valid", "validation", "test")
"""Folders, and names of a data set's ``split``, of validation images; the first one that exists."""
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of image files; whatever else lies in a class's folder is not looked at."""


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
class ImageFolder(LabelledData):
    """Images of ``root/train/<class>/`` and ``root/val/<class>/``, or of ``root/<class>/`` with a share held out."""

    root: str = ""
    """Folder with ``train/`` (and ``val/``, ``valid/``, ``validation/`` or ``test/``), or with the classes' folders."""
    val_share: float = 0.02
    """Share of the images held out for validation where no folder has them; the same images in every run."""

    def __post_init__(self) -> None:
        LabelledData.__post_init__(self)
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.root:
            raise ValueError("task.data.root='' must name a folder of images")

    def class_names(self) -> list[str]:
        folder = self._train_folder()
        names = _subfolders(folder)
        if not names:
            raise ValueError(f"{folder} has no folder for a class: images belong into {folder / '<class>'}")
        return names

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        names, train_folder, val_folder = self.class_names(), self._train_folder(), self._val_folder()
        train = _list(train_folder, names)
        if empty := set(range(len(names))).difference(label for _, label in train):
            raise ValueError(f"{train_folder / names[min(empty)]} holds no image ({', '.join(SUFFIXES)})")
        if val_folder is None:
            # By class and name: the files of every class may be called 0001.jpg, 0002.jpg, ...
            held = held_out({file: f"{names[file[1]]}/{Path(file[0]).name}" for file in train}, share=self.val_share)
            train, val = [file for file in train if file not in held], [file for file in train if file in held]
        else:
            if strangers := sorted(set(_subfolders(val_folder)) - set(names)):
                raise ValueError(f"{val_folder / strangers[0]} is not a class of {train_folder}")
            val = _list(val_folder, names)
        return (
            _file_examples(train, train_folder, image_size),
            _file_examples(val, val_folder or train_folder, image_size),
        )

    def _train_folder(self) -> Path:
        root = Path(self.root)
        if not root.is_dir():
            raise ValueError(f"task.data.root={self.root!r} is not a folder")
        return root / "train" if (root / "train").is_dir() else root

    def _val_folder(self) -> Path | None:
        # Without train/, a folder named val is a class.
        if self._train_folder() == (root := Path(self.root)):
            return None
        return next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)


def _subfolders(folder: Path) -> list[str]:
    """Names of the folders in ``folder``, sorted; hidden ones (.ipynb_checkpoints) are not the user's classes."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """Image files at any depth below each class's folder with their class, in a fixed order."""
    from torchvision.datasets.folder import make_dataset

    listed: list[tuple[str, int]] = make_dataset(
        str(folder),
        {name: label for label, name in enumerate(names)},
        is_valid_file=_is_image,
        allow_empty=True,
    )
    return listed


def _is_image(path: str) -> bool:
    return path.lower().endswith(SUFFIXES) and not Path(path).name.startswith(".")


def _file_examples(files: list[tuple[str, int]], place: Path, image_size: int) -> LabelledExamples:
    item = functools.partial(_read_file, files, image_size)
    return LabelledExamples(count=len(files), item=item, place=str(place))


def _read_file(files: list[tuple[str, int]], image_size: int, index: int) -> tuple[Tensor, int]:
    from tasks.images import read_image

    path, label = files[index]
    return read_image(Path(path), image_size=image_size), label


@dataclass(kw_only=True, slots=True)
class TorchvisionDataset(LabelledData):
    """Images of a data set class of ``torchvision.datasets`` that gives an image and a class number an example."""

    dataset: str = ""
    """Class name: ``CIFAR10``, ``Flowers102``, ``Food101``, ..."""
    root: str = ""
    """Folder of the data set, as its class wants it."""
    download: bool = False
    """Whether its class may download what is missing; nothing is downloaded otherwise."""
    train_split: str = "train"
    """``split`` of the training images, where the class has that argument."""
    val_split: str | None = None
    """``split`` of the validation images; None: the first that the class knows of val, valid, validation, test."""
    val_share: float = 0.02
    """Share of the images held out for validation where the class has neither ``train`` nor ``split``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class: ``'+task.data.options={version:2021_train}'``."""

    def __post_init__(self) -> None:
        LabelledData.__post_init__(self)
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.dataset:
            raise ValueError("task.data.dataset='' must name a class of torchvision.datasets")

    def class_names(self) -> list[str]:
        """Classes by the data set's own names, else by number. Raises ValueError where it names none."""
        opened = self._open(self._train_arguments())
        if names := getattr(opened, "classes", None):
            return [str(name) for name in names]
        if (count := getattr(opened, "num_classes", None)) is None:
            labels = next(
                (found for name in ("targets", "labels", "_labels") if (found := _labels(opened, name))), None
            )
            if labels is None:
                raise ValueError(f"task.data.dataset={self.dataset} does not name its classes: set task.classes")
            count = max(labels) + 1
        return [str(number) for number in range(count)]

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        arguments = self._train_arguments()
        train = self._open(arguments)
        place = f"{self.dataset} in {self.root}" if self.root else self.dataset
        indices = list(range(len(train)))
        if "train" in arguments:
            val = self._open({**arguments, "train": False})
        elif "split" in arguments:
            val = self._open_validation(arguments)
        else:
            val = train
        if val is train:
            stride = max(2, round(1 / self.val_share)) if self.val_share else len(train)
            held = indices[::stride]
            indices = [index for index in indices if index % stride]
        else:
            held = list(range(len(val)))
        return (
            LabelledExamples(count=len(indices), item=DatasetItems(train, indices, image_size, place), place=place),
            LabelledExamples(count=len(held), item=DatasetItems(val, held, image_size, place), place=place),
        )

    def _train_arguments(self) -> dict[str, Any]:
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
        if "train" in known:
            given["train"] = True
        # EMNIST has a split beside it, without a default, which is another kind of choice.
        if "split" in known and ("train" not in known or known["split"].default is inspect.Parameter.empty):
            given["split"] = self.train_split
        return {**given, **self.options}

    def _open_validation(self, arguments: dict[str, Any]) -> Any:
        if self.val_split is not None:
            return self._open({**arguments, "split": self.val_split})
        for split in VAL_NAMES:
            try:
                return self._open({**arguments, "split": split})
            except ValueError:
                continue
        raise ValueError(
            f"task.data.dataset={self.dataset} has no split {', '.join(VAL_NAMES)} there: set task.data.val_split"
        )

    def _open(self, arguments: dict[str, Any]) -> Any:
        try:
            return _open_dataset(self.dataset, json.dumps(arguments, sort_keys=True))
        except Exception as error:  # classes raise RuntimeError, FileNotFoundError, ModuleNotFoundError, ...
            shown = " ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ValueError(
                f"task.data.dataset={self.dataset} cannot be opened with {shown}: {_first_line(error)}"
            ) from None


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

        from tasks.images import ImageError, fit_image

        try:
            image, label = self.dataset[self.indices[index]][:2]
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


def _labels(dataset: Any, name: str) -> list[int] | None:
    """The attribute ``name`` as class numbers, None where it is something else."""
    try:
        return [int(label) for label in getattr(dataset, name)]
    except (AttributeError, TypeError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line.replace("download=True", "task.data.download=true")
