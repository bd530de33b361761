"""Scenes of coloured shapes: drawn with PIL, described by a small grammar.

A caption is a function of what can be seen, so that a model can reach a low loss; few scenes hold many shapes, so that
caption lengths have a long tail: 6 tokens at the least, over 100 at the most.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

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
        """Size, colour and kind."""
        return f"{'big' if self.big else 'small'} {self.colour} {self.kind}"

    @property
    def place(self) -> str:
        """Row and column in words."""
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


@dataclass(kw_only=True, slots=True)
class SceneImages:
    """The scenes ``key/0`` ... ``key/(count - 1)``; calling it with an index draws one."""

    key: str
    """Names the seed and the split."""
    count: int
    """Scenes."""
    max_objects: int
    """Most shapes in a scene."""
    image_size: int
    """Width and height in pixels."""

    def _scene(self, index: int) -> Scene:
        return make_scene(f"{self.key}/{index}", max_objects=self.max_objects)

    def captions(self) -> list[str]:
        """All captions, without drawing."""
        return [self._scene(index).caption() for index in range(self.count)]

    def __call__(self, index: int) -> Tensor:
        """Draw scene ``index`` as uint8 [3, H, W]."""
        pixels = np.array(self._scene(index).draw(self.image_size))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


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
