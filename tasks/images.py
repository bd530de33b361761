"""Images that tasks share: files decoded and cropped to one square size, data sets of them, and drawn scenes."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

Item = TypeVar("Item")
MAX_SUBSTITUTIONS = 50
"""Bad images in a row after which a source is taken to be unusable."""


class ImageError(ValueError):
    """An image file that does not decode; the message names the file."""


class ImageDataset(Dataset[Item]):
    """Examples with an image each; the next one that decodes takes the place of one that does not.

    Item ``i`` is the same in every run. A subclass has a length and reads an example.
    """

    def __init__(self, place: str, *, images: int) -> None:
        """``place``: where the examples come from, for messages."""
        self.place = place
        self.left_out: dict[str, int] = {}
        """Items left out before any image is read, by reason."""
        # In shared memory, so that the main process sees what worker processes found.
        self._undecodable = torch.zeros(images, dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Item:
        """Example ``index``. Raises ImageError for an image that does not decode."""
        raise NotImplementedError

    def image_id(self, index: int) -> int:
        """The image of example ``index``, as a number below ``images``."""
        return index

    @property
    def skipped(self) -> dict[str, int]:
        """Items left out so far, by reason; images that do not decode are found as they are read."""
        undecodable = int(self._undecodable.sum())
        return {**self.left_out, **({"image does not decode": undecodable} if undecodable else {})}

    def __getitem__(self, index: int) -> Item:
        attempts = min(MAX_SUBSTITUTIONS, len(self))
        for offset in range(attempts):
            position = (index + offset) % len(self)
            image_id = self.image_id(position)
            if self._undecodable[image_id]:
                continue
            try:
                return self.read(position)
            except ImageError as error:
                self._undecodable[image_id] = 1
                print(f"left out: {error}", file=sys.stderr, flush=True)
        raise ValueError(f"{self.place}: {attempts} examples in a row have images that do not decode")


def read_image(path: Path, *, image_size: int) -> Tensor:
    """Read JPEG, PNG and whatever else PIL reads, in any colour mode, as uint8 RGB [3, H, W].

    Raises ImageError, naming the file, for one that is missing, broken or cut short.
    """
    try:
        with Image.open(path) as image:
            # A JPEG decodes at a half, a quarter or an eighth of its size for little more than that share of the time.
            image.draft("RGB", (2 * image_size, 2 * image_size))
            return fit_image(image, image_size=image_size)
    except Exception as error:  # PIL's plug-ins raise many kinds, struct.error and SyntaxError included
        raise ImageError(f"{path} does not decode ({type(error).__name__})") from None


def fit_image(image: Image.Image, *, image_size: int) -> Tensor:
    """Resize the shorter side and crop the centre of an image of any mode; returns uint8 RGB [3, H, W]."""
    return to_tensor(ImageOps.fit(_to_rgb(image), (image_size, image_size), method=Image.Resampling.BILINEAR))


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as uint8 [3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        # 16-bit grey: PIL's own conversion clips at 255 and would turn nearly every pixel white.
        return Image.fromarray((np.asarray(image, dtype=np.float32) / 257.0).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


class KeptImages:
    """Item ``i`` is item ``i % count`` of ``item``, which is asked for it once.

    Filled as images are asked for, by whichever process is first; two that make the same image write the same bytes.
    """

    def __init__(self, item: Callable[[int], tuple[Tensor, int]], *, count: int, image_size: int) -> None:
        """``count``: different images, 3 bytes a pixel each."""
        self._item = item
        self._images = torch.empty((count, 3, image_size, image_size), dtype=torch.uint8).share_memory_()
        self._labels = torch.full((count,), -1).share_memory_()

    def __call__(self, index: int) -> tuple[Tensor, int]:
        """Image (uint8 [3, H, W]; not to be written to) and class."""
        place = index % len(self._images)
        if int(self._labels[place]) < 0:
            image, label = self._item(place)
            self._images[place] = image
            self._labels[place] = label  # last: whoever sees it sees the image
        return self._images[place], int(self._labels[place])


COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
    "orange": (245, 140, 30),
}
GROUNDS = {"white": (240, 240, 240), "grey": (128, 128, 128), "black": (16, 16, 16)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(kw_only=True, slots=True)
class Shape:
    """One shape of a scene."""

    kind: str
    """One of ``SHAPES``."""
    colour: str
    """Key of ``COLOURS``."""
    big: bool
    """Whether it fills its cell or about half of it."""
    cell: int
    """Cell of the 3 x 3 grid, 0..8, row by row."""
    shift: tuple[float, float]
    """Offset of the centre, in cells."""

    @property
    def name(self) -> str:
        return f"{'big' if self.big else 'small'} {self.colour} {self.kind}"

    @property
    def place(self) -> str:
        return f"{ROWS[self.cell // 3]} {COLUMNS[self.cell % 3]}"


@dataclass(kw_only=True, slots=True)
class Scene:
    """Shapes on a ground, in reading order."""

    ground: str
    """Key of ``GROUNDS``."""
    shapes: list[Shape]
    """One to nine shapes in different cells."""

    def caption(self) -> str:
        """Describe the scene: one shape in four words, nine in over a hundred."""
        count = len(self.shapes)
        if count == 1:
            return f"a {self.shapes[0].name}"
        if count == 2:
            return f"a {self.shapes[0].name} and a {self.shapes[1].name} on {self.ground}"
        listed = ", ".join(f"a {shape.name} at the {shape.place}" for shape in self.shapes)
        caption = f"{NUMBERS[count - 1]} shapes on a {self.ground} ground: {listed}."
        if count >= 6:
            pairs = zip(self.shapes[:4], self.shapes[1:4], strict=False)
            caption += "".join(f" the {left.name} comes before the {right.name}." for left, right in pairs)
        return caption

    def draw(self, image_size: int) -> Image.Image:
        """Draw the scene as an RGB image of ``image_size`` pixels square."""
        image = Image.new("RGB", (image_size, image_size), GROUNDS[self.ground])
        pen = ImageDraw.Draw(image)
        cell = image_size / 3
        for shape in self.shapes:
            row, column = divmod(shape.cell, 3)
            x, y = (column + 0.5 + shape.shift[0]) * cell, (row + 0.5 + shape.shift[1]) * cell
            _draw_shape(pen, shape.kind, COLOURS[shape.colour], x, y, cell * (0.45 if shape.big else 0.24))
        return image


def make_scene(key: str, *, max_objects: int = 9) -> Scene:
    """Make the scene that belongs to ``key``: equal keys give equal scenes on every machine."""
    # A string seed goes through SHA-512 (documented in the random module), so neighbouring keys are unrelated.
    draw = random.Random(key)
    # Halving chances: half of the scenes hold one shape, a quarter two, one in 256 all nine.
    count = min(1 + int(-math.log2(1.0 - draw.random())), max_objects)
    cells = sorted(draw.sample(range(9), count))
    shapes = [
        Shape(
            kind=draw.choice(SHAPES),
            colour=draw.choice(tuple(COLOURS)),
            big=draw.random() < 0.5,
            cell=cell,
            shift=(draw.uniform(-0.05, 0.05), draw.uniform(-0.05, 0.05)),
        )
        for cell in cells
    ]
    return Scene(ground=draw.choice(tuple(GROUNDS)), shapes=shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """The scenes ``key/0``, ``key/1``, ..."""

    key: str
    """Names the seed and the split."""
    max_objects: int
    """Most shapes in a scene."""
    image_size: int
    """Width and height in pixels."""

    def __getitem__(self, index: int) -> Scene:
        return make_scene(f"{self.key}/{index}", max_objects=self.max_objects)

    def image(self, index: int) -> Tensor:
        """Draw scene ``index`` as uint8 [3, H, W]."""
        return to_tensor(self[index].draw(self.image_size))

    def labelled_image(self, index: int) -> tuple[Tensor, int]:
        """Draw scene ``index``, of one shape; returns it with its class, see ``shape_classes``."""
        (shape,) = self[index].shapes
        return self.image(index), SHAPES.index(shape.kind) * len(COLOURS) + list(COLOURS).index(shape.colour)


def shape_classes() -> list[str]:
    """Colour and kind of each class of shapes."""
    return [f"{colour} {kind}" for kind in SHAPES for colour in COLOURS]


def _draw_shape(
    pen: ImageDraw.ImageDraw, kind: str, colour: tuple[int, int, int], x: float, y: float, radius: float
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        pen.ellipse(box, fill=colour)
    elif kind == "ring":
        pen.ellipse(box, outline=colour, width=max(1, round(radius * 0.4)))
    elif kind == "square":
        pen.rectangle((x - radius * 0.85, y - radius * 0.85, x + radius * 0.85, y + radius * 0.85), fill=colour)
    elif kind == "triangle":
        pen.polygon(((x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)), fill=colour)
    else:
        bar = radius * 0.3
        pen.rectangle((x - radius, y - bar, x + radius, y + bar), fill=colour)
        pen.rectangle((x - bar, y - radius, x + bar, y + radius), fill=colour)
