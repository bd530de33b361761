"""Caption strip: images side by side with their true and generated captions, for TensorBoard."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

IMAGE_PIXELS = 224
"""Edge of an image in the strip; smaller ones are enlarged."""
COLUMNS = 4
LINE_LETTERS = 34
MOST_LINES = 9
LINE_PIXELS = 15
MARGIN_PIXELS = 8


def draw_strip(images_BCHW: Tensor, true_texts: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """Draw uint8 images [B, 3, H, W] four to a row, captions beneath; returns uint8 [height, width, 3]."""
    lines = [_wrap("true: ", true) + _wrap("said: ", said) for true, said in zip(true_texts, texts, strict=True)]
    cell_width = IMAGE_PIXELS + MARGIN_PIXELS
    cell_height = IMAGE_PIXELS + 2 * MARGIN_PIXELS + LINE_PIXELS * max(len(wrapped) for wrapped in lines)
    rows = -(-len(lines) // COLUMNS)
    strip = Image.new("RGB", (cell_width * min(COLUMNS, len(lines)) + MARGIN_PIXELS, cell_height * rows), "white")
    pen = ImageDraw.Draw(strip)
    font = ImageFont.load_default(12)
    for index, (image_CHW, wrapped) in enumerate(zip(images_BCHW, lines, strict=True)):
        x = MARGIN_PIXELS + cell_width * (index % COLUMNS)
        y = MARGIN_PIXELS + cell_height * (index // COLUMNS)
        picture = Image.fromarray(image_CHW.permute(1, 2, 0).numpy()).resize((IMAGE_PIXELS, IMAGE_PIXELS))
        strip.paste(picture, (x, y))
        for number, (line, colour) in enumerate(wrapped):
            pen.text((x, y + IMAGE_PIXELS + 2 + number * LINE_PIXELS), line, fill=colour, font=font)
    return np.array(strip)


def caption_table(true_texts: Sequence[str], texts: Sequence[str]) -> str:
    """Markdown table of true and generated captions."""
    rows = [f"| {_cell(true)} | {_cell(said)} |" for true, said in zip(true_texts, texts, strict=True)]
    return "\n".join(["| true | generated |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _wrap(label: str, text: str) -> list[tuple[str, str]]:
    """Lines with their colour; a long caption ends in an ellipsis."""
    lines = textwrap.wrap(label + text, LINE_LETTERS, max_lines=MOST_LINES, placeholder=" ...") or [label]
    return [(line, "black" if label.startswith("true") else "blue") for line in lines]
