"""Images that tasks share: files decoded and cropped to one square size, and drawn scenes as data sets."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor


def read_image(path: str | Path, *, image_size: int) -> Tensor:
    """Read JPEG, PNG and whatever else PIL reads, in any mode, its centre resized, as uint8 RGB [3, H, W].

    Raises ValueError, naming the file, for one that is missing, broken or cut short.
    """
    try:
        with Image.open(path) as image:
            # A JPEG decodes at a half, a quarter or an eighth of its size for little more than that share of the time.
            image.draft("RGB", (2 * image_size, 2 * image_size))
            fitted = ImageOps.fit(_to_rgb(image), (image_size, image_size), method=Image.Resampling.BILINEAR)
    except Exception as error:  # PIL's plug-ins raise many kinds, struct.error and SyntaxError included
        raise ValueError(f"{path} does not decode ({type(error).__name__})") from None
    return pil_to_tensor(fitted).contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        # 16-bit grey: PIL's own conversion clips at 255 and would turn nearly every pixel white.
        grey = (np.asarray(image, dtype=np.float32) / 257.0).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(grey)
    if image.mode == "P" and "transparency" in image.info:  # PIL warns of it, which under -W error does not decode
        image = image.convert("RGBA")
    return image.convert("RGB")


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
        listed = ", ".join(
            f"a {shape.name} at the {ROWS[shape.cell // 3]} {COLUMNS[shape.cell % 3]}" for shape in self.shapes
        )
        caption = f"{NUMBERS[count - 1]} shapes on a {self.ground} ground: {listed}."
        if count >= 6:
            pairs = zip(self.shapes[:4], self.shapes[1:4], strict=False)
            caption += "".join(f" the {left.name} comes before the {right.name}." for left, right in pairs)
        return caption

    def draw(self, image_size: int) -> Tensor:
        """Draw the scene as an RGB image, uint8 [3, ``image_size``, ``image_size``]."""
        image = Image.new("RGB", (image_size, image_size), GROUNDS[self.ground])
        pen = ImageDraw.Draw(image)
        cell = image_size / 3
        for shape in self.shapes:
            row, column = divmod(shape.cell, 3)
            x, y = (column + 0.5 + shape.shift[0]) * cell, (row + 0.5 + shape.shift[1]) * cell
            radius, colour = cell * (0.45 if shape.big else 0.24), COLOURS[shape.colour]
            box = (x - radius, y - radius, x + radius, y + radius)
            if shape.kind == "circle":
                pen.ellipse(box, fill=colour)
            elif shape.kind == "ring":
                pen.ellipse(box, outline=colour, width=max(1, round(radius * 0.4)))
            elif shape.kind == "square":
                half = radius * 0.85
                pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
            elif shape.kind == "triangle":
                pen.polygon(
                    ((x, y - radius), (x - radius, y + radius * 0.8), (x + radius, y + radius * 0.8)), fill=colour
                )
            else:
                bar = radius * 0.3
                pen.rectangle((x - radius, y - bar, x + radius, y + bar), fill=colour)
                pen.rectangle((x - bar, y - radius, x + bar, y + radius), fill=colour)
        return pil_to_tensor(image).contiguous()


def make_scene(key: str, *, max_objects: int) -> Scene:
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


def scene_image(key: str, max_objects: int, image_size: int, index: int) -> Tensor:
    """The image of the scene ``key/index``; ``key`` names the seed and the split."""
    return make_scene(f"{key}/{index}", max_objects=max_objects).draw(image_size)


class LabelledScenes(Dataset[tuple[Tensor, int]]):
    """Scenes of one shape: uint8 [3, H, W], and the class, a number for each pair of kind and colour.

    ``distinct``: so many scenes are drawn once, kept in shared memory (3 bytes a pixel) and repeated.
    """

    def __init__(self, key: str, count: int, *, image_size: int, distinct: int | None = None) -> None:
        self._key, self._count, self._image_size = key, count, image_size
        self._kept: list[tuple[Tensor, int]] = []
        if distinct is not None:
            images, labels = zip(*(self._draw(index) for index in range(min(distinct, count))), strict=True)
            self._kept = list(zip(torch.stack(images).share_memory_(), labels, strict=True))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self._count:
            raise IndexError(index)
        return self._kept[index % len(self._kept)] if self._kept else self._draw(index)

    def _draw(self, index: int) -> tuple[Tensor, int]:
        scene = make_scene(f"{self._key}/{index}", max_objects=1)
        (shape,) = scene.shapes
        label = SHAPES.index(shape.kind) * len(COLOURS) + list(COLOURS).index(shape.colour)
        return scene.draw(self._image_size), label
