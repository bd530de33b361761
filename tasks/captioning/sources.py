"""Sources of captioned images: drawn shapes, lognormal lengths, COCO's layout, CSV files."""

from __future__ import annotations

import csv
import itertools
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.base import Loading, held_out, require_at_least, require_fields, require_share
from tasks.resources import MIN_EXAMPLE_BYTES, cache_folder, require_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Examples:
    """One split: caption ``i`` belongs to the image that ``image(i)`` returns."""

    captions: list[str]
    """One caption an example; an image with several captions is several examples."""
    image: Callable[[int], Tensor]
    """Index of an example to its uint8 image [3, H, W]; raises ``ImageError`` for a file that does not decode."""
    place: str
    """Where the examples come from, for messages: a folder or a file."""
    image_ids: list[int] | None = None
    """The image of each example, as a number below the number of examples; None: every example has its own."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Items already left out, by reason."""


@dataclass(kw_only=True, slots=True)
class CaptionData(Loading):
    """Base of every source of captioned images."""

    pad_to: int | None = None
    """Text positions of every batch; None: as many as the longest caption of the batch needs. Longer captions are
    left out and counted."""

    def __post_init__(self) -> None:
        Loading.__post_init__(self)
        require_at_least("task.data.pad_to", self.pad_to, 2)

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """List training and validation examples with images of ``image_size`` pixels square.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer trained on these captions is kept."""
        return cache_folder()


@dataclass(kw_only=True, slots=True)
class GeneratedCaptions(CaptionData):
    """Base of the sources that need no files; example ``i`` depends on the seed and ``i`` alone."""

    train_images: int = 16384
    """Training examples."""
    val_images: int = 256
    """Validation examples; none of them is a training example."""

    def __post_init__(self) -> None:
        CaptionData.__post_init__(self)
        require_fields("task.data", self, train_images=1, val_images=1)

    def generate(self, key: str, count: int, image_size: int) -> Examples:
        """``count`` examples of the split that ``key`` names."""
        raise NotImplementedError

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        given = f"task.data.train_images={self.train_images}, task.data.val_images={self.val_images}"
        require_memory(given, MIN_EXAMPLE_BYTES * (self.train_images + self.val_images))
        return (
            self.generate(f"{seed}/train", self.train_images, image_size),
            self.generate(f"{seed}/val", self.val_images, image_size),
        )


@dataclass(kw_only=True, slots=True)
class Shapes(GeneratedCaptions):
    """The embedded data set: coloured shapes drawn by code, with captions of very different lengths."""

    max_objects: int = 9
    """Most shapes in a scene, 1 to 9; more shapes make longer captions."""

    def __post_init__(self) -> None:
        GeneratedCaptions.__post_init__(self)
        if not 1 <= self.max_objects <= 9:
            raise ValueError(f"task.data.max_objects={self.max_objects} must be 1 to 9")

    def generate(self, key: str, count: int, image_size: int) -> Examples:
        from tasks.images import Scenes

        scenes = Scenes(key=key, max_objects=self.max_objects, image_size=image_size)
        captions = [scenes[index].caption() for index in range(count)]
        return Examples(captions=captions, image=scenes.image, place="the embedded shapes")


WORDS = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeio", "rstvz", "uy")]
"""Each becomes one token once the tokenizer has a few thousand."""


@dataclass(kw_only=True, slots=True)
class Lognormal(GeneratedCaptions):
    """Noise with captions of lognormal lengths, as the documents and sentences of real corpora have them.

    What a model can learn from them is the order of words within a caption.
    """

    median: float = 60.0
    """Median length in text positions."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of the length; 0 = all of one length."""
    shortest: int = 4
    """Positions of the shortest caption; what would be shorter gets this length."""
    longest: int = 256
    """Positions of the longest caption; what would be longer gets this length."""

    def __post_init__(self) -> None:
        GeneratedCaptions.__post_init__(self)
        require_fields("task.data", self, median=1, sigma=0, shortest=2, longest=self.shortest)

    def generate(self, key: str, count: int, image_size: int) -> Examples:
        captions = [self._caption(f"{key}/{index}") for index in range(count)]
        return Examples(captions=captions, image=Noise(key, image_size), place="captions of lognormal lengths")

    def _caption(self, key: str) -> str:
        draw = random.Random(key)
        positions = round(draw.lognormvariate(0.0, self.sigma) * self.median)
        words = min(max(positions, self.shortest), self.longest) - 1  # and the end
        start, stride = draw.randrange(len(WORDS)), draw.randrange(1, 8)
        return " ".join(WORDS[(start + stride * index) % len(WORDS)] for index in range(words))


@dataclass(frozen=True, slots=True)
class Noise:
    """Images of random pixels."""

    key: str
    size: int

    def __call__(self, index: int) -> Tensor:
        """uint8 [3, size, size], the same at every call with ``index``."""
        import torch

        # Not hash(): that differs from process to process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.key}/{index}".encode()))
        return torch.randint(0, 256, (3, self.size, self.size), dtype=torch.uint8, generator=generator)


class FileCaption(NamedTuple):
    """One caption of one image file."""

    path: Path
    """The image."""
    caption: str
    """Its caption, as written in the file."""


Listed = tuple[list[FileCaption], Path]
"""Captions, and the file that lists them."""


@dataclass(kw_only=True, slots=True)
class CaptionFiles(CaptionData):
    """Base of the sources whose images are files; missing ones are left out and counted."""

    val_share: float = 0.02
    """Share of the images held out for validation where no validation file is given; the same images in every run."""

    def __post_init__(self) -> None:
        CaptionData.__post_init__(self)
        require_share("task.data.val_share", self.val_share, below_one=True)

    def read(self) -> tuple[Listed, Listed | None]:
        """Training and validation captions, each with the file that lists them; None: to be held out.

        Raises ValueError, naming the file or folder, for one that cannot be used.
        """
        raise NotImplementedError

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """List both splits. Raises ValueError, naming the file or folder, for one that cannot be used."""
        (train, place), val = self.read()
        if val is None:
            # By a hash of the file's name: all captions of an image fall on one side.
            held = held_out({item.path: item.path.name for item in train}, share=self.val_share)
            val = [item for item in train if item.path in held], place
            train = [item for item in train if item.path not in held]
        return _examples(train, place, image_size), _examples(*val, image_size)


def _examples(items: list[FileCaption], place: Path, image_size: int) -> Examples:
    from tasks.images import FolderListing

    listing = FolderListing()
    present = [item for item in items if listing.has(item.path)]
    first: dict[Path, int] = {}
    missing = len(items) - len(present)
    return Examples(
        captions=[" ".join(item.caption.split()) for item in present],
        image=partial(_image, [item.path for item in present], image_size),
        place=str(place),
        image_ids=[first.setdefault(item.path, index) for index, item in enumerate(present)],
        skipped={"image missing": missing} if missing else {},
    )


def _image(paths: list[Path], image_size: int, index: int) -> Tensor:
    from tasks.images import read_image

    return read_image(paths[index], image_size=image_size)


@dataclass(kw_only=True, slots=True)
class Coco(CaptionFiles):
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

    def __post_init__(self) -> None:
        CaptionFiles.__post_init__(self)
        if not self.root and not (self.annotations and self.images):
            raise ValueError("task.data.root='' must name a folder, or task.data.annotations and task.data.images both")

    def read(self) -> tuple[Listed, Listed | None]:
        train_file, train_folder = self._train_place()
        val = None
        # Explicit training files without a validation file mean: hold some out, whatever lies under the root.
        if self.val_annotations or not self.annotations:
            val = self._place("val", self.val_annotations, self.val_images, train_folder)
        return (
            (read_annotations(train_file, train_folder), train_file),
            None if val is None else (read_annotations(*val), val[0]),
        )

    def tokenizer_folder(self) -> Path:
        return self._train_place()[0].parent

    def _train_place(self) -> tuple[Path, Path]:
        if not (self.annotations and self.images) and not Path(self.root).is_dir():
            raise ValueError(f"task.data.root={self.root!r} is not a folder")
        place = self._place("train", self.annotations, self.images, None)
        if place is None:
            raise ValueError(f"task.data.root={self.root!r} has no annotations/captions_train*.json")
        return place

    def _place(self, split: str, annotations: str, images: str, otherwise: Path | None) -> tuple[Path, Path] | None:
        """File and image folder of a split, as named or as found under the root; None: there is no file."""
        root = Path(self.root) if self.root else None
        file: Path | None = Path(annotations) if annotations else None
        folder: Path | None = Path(images) if images else None
        if root is not None and file is None:
            # The last name is the latest year: captions_train2017.json after captions_train2014.json.
            file = max((root / "annotations").glob(f"captions_{split}*.json"), default=None)
        if file is None:
            return None
        if root is not None and folder is None:
            # train2017 for captions_train2017.json, else the last folder whose name begins with the split's.
            same_year = root / file.stem.removeprefix("captions_")
            folders = (path for path in root.glob(f"{split}*") if path.is_dir())
            folder = same_year if same_year.is_dir() else max(folders, default=None)
        folder = folder or otherwise
        if folder is None or not folder.is_dir():
            raise ValueError(f"{folder or Path(self.root) / f'{split}*'} is not a folder of images")
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
        raise ValueError(f"{place} has no {key!r}" if isinstance(item, dict) else f"{place} is not a JSON object")
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


@dataclass(kw_only=True, slots=True)
class Csv(CaptionFiles):
    """Captioned images of a CSV file with a header line, UTF-8."""

    file: str = ""
    """CSV file of training captions."""
    image_column: str = "image"
    """Column with the image's path."""
    caption_column: str = "caption"
    """Column with the caption; an image with several captions has several rows."""
    image_root: str = ""
    """Folder that relative image paths begin at; empty: the folder of the CSV file."""
    delimiter: str = ","
    """One character between columns; ``\\t`` for a tab."""
    val_file: str = ""
    """CSV file of validation captions; empty: a share of the images is held out."""

    def __post_init__(self) -> None:
        CaptionFiles.__post_init__(self)
        if not self.file:
            raise ValueError("task.data.file='' must name a CSV file")
        if len(self._delimiter()) != 1:
            raise ValueError(f"task.data.delimiter={self.delimiter!r} must be one character")

    def read(self) -> tuple[Listed, Listed | None]:
        train, val = Path(self.file), Path(self.val_file)
        return (self._read(train), train), (self._read(val), val) if self.val_file else None

    def tokenizer_folder(self) -> Path:
        return Path(self.file).parent

    def _delimiter(self) -> str:
        return "\t" if self.delimiter == "\\t" else self.delimiter

    def _read(self, file: Path) -> list[FileCaption]:
        if self.image_root and not Path(self.image_root).is_dir():
            raise ValueError(f"task.data.image_root={self.image_root!r} is not a folder")
        folder = Path(self.image_root) if self.image_root else file.parent
        try:
            # utf-8-sig: spreadsheets begin files with a byte order mark, which would join the first column's name.
            with file.open(encoding="utf-8-sig", newline="") as lines:
                rows = csv.DictReader(lines, delimiter=self._delimiter())
                columns = list(rows.fieldnames or [])
                for name in (self.image_column, self.caption_column):
                    if name not in columns:
                        raise ValueError(
                            f"{file} has no column {name!r}; it has {', '.join(map(repr, columns)) or 'none'}"
                        )
                return [
                    FileCaption(folder / (row[self.image_column] or ""), row[self.caption_column] or "") for row in rows
                ]
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a UTF-8 CSV file ({error})") from None
