"""Torchvision: labelled images of any data set class of torchvision, read from its folder."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.checks import require_share
from tasks.data.labelled_data import LabelledData, LabelledExamples

if TYPE_CHECKING:
    from torch import Tensor

VAL_SPLITS = ("val", "valid", "validation", "test")
"""Names that a data set's ``split`` may give its validation images, tried in this order."""


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
        """Raise ValueError for values out of range or missing."""
        LabelledData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.dataset:
            raise ValueError("task.data.dataset='' must name a class of torchvision.datasets")

    def class_names(self) -> list[str]:
        """Classes by the data set's own names, else by number. Raises ValueError where it does not tell them."""
        opened = self._open(self._train_arguments())
        if names := getattr(opened, "classes", None):
            return [str(name) for name in names]
        if (count := getattr(opened, "num_classes", None)) is None:
            labels = next(
                (found for name in ("targets", "labels", "_labels") if (found := _labels(opened, name))), None
            )
            if labels is None:
                raise ValueError(f"task.data.dataset={self.dataset} does not tell its classes: set task.classes")
            count = max(labels) + 1
        return [str(number) for number in range(count)]

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        """Open both splits. Raises ValueError for an unknown class and for files that are not there."""
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
        """Arguments that open the training images."""
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
        """Open the validation images of a class that has ``split``."""
        if self.val_split is not None:
            return self._open({**arguments, "split": self.val_split})
        for split in VAL_SPLITS:
            try:
                return self._open({**arguments, "split": split})
            except ValueError:
                continue
        raise ValueError(
            f"task.data.dataset={self.dataset} has no split {', '.join(VAL_SPLITS)} there: set task.data.val_split"
        )

    def _open(self, arguments: dict[str, Any]) -> Any:
        try:
            return _open_dataset(self.dataset, json.dumps(arguments, sort_keys=True))
        except (
            Exception
        ) as error:  # classes raise whatever they like: RuntimeError, FileNotFoundError, ModuleNotFoundError
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

        from tasks.data.image_files import ImageError, fit_image

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
    """The class of that name. Raises ValueError with near ones."""
    from torchvision import datasets

    known = {each: kind for each, kind in vars(datasets).items() if each in datasets.__all__ and inspect.isclass(kind)}
    if name not in known:
        by_case = {each.lower(): each for each in known}
        near = [by_case[match] for match in difflib.get_close_matches(name.lower(), by_case, n=3)]
        raise ValueError(
            f"task.data.dataset={name!r} is no class of torchvision.datasets"
            + (f"; near: {', '.join(near)}" * bool(near))
        )
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
