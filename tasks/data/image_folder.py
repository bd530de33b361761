"""Image folder: labelled images in the layout of torchvision's ``ImageFolder``, one folder a class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasks.checks import require_share
from tasks.data.hold_out import held_out
from tasks.data.labelled_data import LabelledData, LabelledExamples

if TYPE_CHECKING:
    from torch import Tensor

TRAIN_NAME = "train"
VAL_NAMES = ("val", "valid", "validation", "test")
"""Folders of validation images, the first one that exists."""
SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
"""Endings of image files; whatever else lies in a class's folder is not looked at."""


class LabelledFile(NamedTuple):
    """One image file and its class."""

    path: Path
    label: int


@dataclass(kw_only=True, slots=True)
class ImageFolder(LabelledData):
    """Images of ``root/train/<class>/`` and ``root/val/<class>/``, or of ``root/<class>/`` with a share held out."""

    root: str = ""
    """Folder with ``train/`` (and ``val/``, ``valid/``, ``validation/`` or ``test/``), or with the classes' folders."""
    val_share: float = 0.02
    """Share of the images held out for validation where no folder has them; the same images in every run."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or missing."""
        LabelledData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.root:
            raise ValueError("task.data.root='' must name a folder of images")

    def class_names(self) -> list[str]:
        """Folders of training images, sorted. Raises ValueError, naming the folder, where there are none."""
        folder = self._train_folder()
        names = list(_subfolders(folder))
        if not names:
            raise ValueError(f"{folder} has no folder for a class: images belong into {folder / '<class>'}")
        return names

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        """List both splits. Raises ValueError, naming the folder, for one that cannot be used."""
        names, train_folder, val_folder = self.class_names(), self._train_folder(), self._val_folder()
        train = _list(train_folder, names)
        for label, name in enumerate(names):
            if not any(file.label == label for file in train):
                raise ValueError(f"{train_folder / name} holds no image ({', '.join(sorted(SUFFIXES))})")
        if val_folder is None:
            # By class and name: the files of every class may be called 0001.jpg, 0002.jpg, ...
            held = held_out({file: f"{names[file.label]}/{file.path.name}" for file in train}, share=self.val_share)
            train, val = [file for file in train if file not in held], [file for file in train if file in held]
        else:
            if strangers := sorted(set(_subfolders(val_folder)) - set(names)):
                raise ValueError(f"{val_folder / strangers[0]} is no class of {train_folder}")
            val = _list(val_folder, names)
        return (
            _examples(train, place=str(train_folder), image_size=image_size),
            _examples(val, place=str(val_folder or train_folder), image_size=image_size),
        )

    def _train_folder(self) -> Path:
        root = Path(self.root)
        if not root.is_dir():
            raise ValueError(f"task.data.root={self.root!r} is not a folder")
        return root / TRAIN_NAME if (root / TRAIN_NAME).is_dir() else root

    def _val_folder(self) -> Path | None:
        # Without train/, a folder named val is a class.
        if self._train_folder() == (root := Path(self.root)):
            return None
        return next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)


@dataclass(frozen=True, slots=True)
class LabelledFiles:
    """Example index to image and class."""

    files: Sequence[LabelledFile]
    image_size: int

    def __call__(self, index: int) -> tuple[Tensor, int]:
        """Read example ``index``; raises ImageError for a file that does not decode."""
        from tasks.data.image_files import read_image

        path, label = self.files[index]
        return read_image(path, image_size=self.image_size), label


def _examples(files: Sequence[LabelledFile], *, place: str, image_size: int) -> LabelledExamples:
    return LabelledExamples(count=len(files), item=LabelledFiles(files, image_size), place=place)


def _subfolders(folder: Path) -> Iterator[str]:
    """Names of the folders in ``folder``, sorted; hidden ones (.ipynb_checkpoints) are not the user's classes."""
    return (entry.name for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, names: Sequence[str]) -> list[LabelledFile]:
    """Image files at any depth below each class's folder, in a fixed order."""
    files: list[LabelledFile] = []
    for label, name in enumerate(names):
        for parent, below, entries in os.walk(folder / name, followlinks=True):
            below.sort()
            files.extend(
                LabelledFile(Path(parent, entry), label)
                for entry in sorted(entries)
                if Path(entry).suffix.lower() in SUFFIXES and not entry.startswith(".")
            )
    return files
