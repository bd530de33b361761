"""Coco: images with captions in the layout of COCO (https://cocodataset.org/#format-data, caption annotations)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.checks import require_share
from tasks.data.captions import CaptionData, Examples
from tasks.data.file_examples import FileCaption, file_examples, hold_out


@dataclass(kw_only=True, slots=True)
class Coco(CaptionData):
    """Captioned images of a COCO folder, or of annotation files and image folders named one by one."""

    root: str = ""
    """Folder with ``annotations/captions_train*.json`` and ``train*/``, and the same with ``val``. Empty: the fields
    below name the files."""
    annotations: str = ""
    """JSON file of training captions; empty: found under ``root``."""
    images: str = ""
    """Folder of training images; empty: found under ``root``."""
    val_annotations: str = ""
    """JSON file of validation captions; empty: found under ``root``, else some training images are held out."""
    val_images: str = ""
    """Folder of validation images; empty: found under ``root``, else ``images``."""
    val_share: float = 0.02
    """Share of the images held out for validation where no validation file is given; the same images in every run."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or missing."""
        CaptionData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.root and not (self.annotations and self.images):
            raise ValueError("task.data.root='' must name a folder, or task.data.annotations and task.data.images both")

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """List both splits. Raises ValueError, naming the file or folder, for one that cannot be used."""
        train_file, train_folder = self._train_place()
        train = read_annotations(train_file, train_folder)
        val_place = self._val_place(train_folder)
        if val_place is None:
            train, val, val_file = *hold_out(train, share=self.val_share), train_file
        else:
            val, val_file = read_annotations(*val_place), val_place[0]
        return (
            file_examples(train, place=str(train_file), image_size=image_size),
            file_examples(val, place=str(val_file), image_size=image_size),
        )

    def tokenizer_folder(self) -> Path:
        """The folder of the training annotations."""
        return self._train_place()[0].parent

    def _train_place(self) -> tuple[Path, Path]:
        root = Path(self.root)
        if not (self.annotations and self.images) and not root.is_dir():
            raise ValueError(f"task.data.root={self.root!r} is not a folder")
        file = Path(self.annotations) if self.annotations else _find_annotations(root, "train")
        if file is None:
            raise ValueError(f"task.data.root={self.root!r} has no annotations/captions_train*.json")
        folder = Path(self.images) if self.images else _find_images(root, "train", file)
        if folder is None or not folder.is_dir():
            raise ValueError(f"{folder or root / 'train*'} is not a folder of images")
        return file, folder

    def _val_place(self, train_folder: Path) -> tuple[Path, Path] | None:
        root = Path(self.root) if self.root else None
        if self.val_annotations:
            file: Path | None = Path(self.val_annotations)
        else:
            # Explicit training files without a validation file mean: hold some out, whatever lies under the root.
            file = _find_annotations(root, "val") if root is not None and not self.annotations else None
        if file is None:
            return None
        folder = Path(self.val_images) if self.val_images else None
        if folder is None and root is not None:
            folder = _find_images(root, "val", file)
        folder = folder or train_folder
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder of images")
        return file, folder


def read_annotations(file: Path, folder: Path) -> list[FileCaption]:
    """Read a caption annotation file; raises ValueError, naming it, where it is missing or not of that format."""
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a COCO file: it holds no JSON object")
    for key in ("images", "annotations"):
        if not isinstance(content.get(key), list):
            raise ValueError(f"{file} is not a COCO file: it has no list '{key}'")
    paths: dict[int | str, Path] = {}
    for number, image in enumerate(content["images"]):
        place = f"{file} is not a COCO caption file: images[{number}]"
        image_id = _take(image, "id", (int, str), place)
        paths[image_id] = folder / _take(image, "file_name", str, place)
    captions = []
    for number, item in enumerate(content["annotations"]):
        place = f"{file} is not a COCO caption file: annotations[{number}]"
        image_id = _take(item, "image_id", (int, str), place)
        # An annotation of an image that the file does not list is a missing image, not a broken file.
        path = paths.get(image_id, folder / f"image {image_id}")
        captions.append(FileCaption(path, _take(item, "caption", (str, type(None)), place) or ""))
    return captions


def _take(item: Any, key: str, kinds: type | tuple[type, ...], place: str) -> Any:
    """``item[key]``. Raises ValueError, naming the entry ``place``, where it is missing or of another type."""
    if not isinstance(item, dict) or key not in item:
        raise ValueError(f"{place} has no {key!r}" if isinstance(item, dict) else f"{place} is no JSON object")
    if not isinstance(item[key], kinds) or isinstance(item[key], bool):
        wanted = "text or a number" if kinds == (int, str) else "text"
        raise ValueError(f"{place}: {key!r} is {json.dumps(item[key])[:40]}, not {wanted}")
    return item[key]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError as error:  # JSON errors and bytes that are no text.
        raise ValueError(f"{file} is not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{file} is not JSON that can be read (nested too deeply)") from None


def _find_annotations(root: Path, split: str) -> Path | None:
    # The last name is the latest year: captions_train2017.json after captions_train2014.json.
    return max((root / "annotations").glob(f"captions_{split}*.json"), default=None)


def _find_images(root: Path, split: str, annotations: Path) -> Path | None:
    """``train2017`` for ``captions_train2017.json``, else the last folder whose name begins with the split's."""
    same_year = root / re.sub(r"^captions_", "", annotations.stem)
    if same_year.is_dir():
        return same_year
    return max((path for path in root.glob(f"{split}*") if path.is_dir()), default=None)
