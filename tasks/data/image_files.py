"""Image files of any common kind, decoded, resized and cropped to one square size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor


class ImageError(ValueError):
    """An image file that does not decode; the message names the file."""


@dataclass(kw_only=True, slots=True)
class ImageFiles:
    """Example index to image; the same file may serve several examples."""

    paths: Sequence[Path]
    """One path an example."""
    image_size: int
    """Width and height in pixels after resizing the shorter side and cropping the centre."""

    def __call__(self, index: int) -> Tensor:
        """Read example ``index`` as uint8 RGB [3, H, W]; raises ImageError for a file that does not decode."""
        return read_image(self.paths[index], image_size=self.image_size)


def read_image(path: Path, *, image_size: int) -> Tensor:
    """Read JPEG, PNG and whatever else PIL reads, in any colour mode, as uint8 RGB [3, H, W].

    Raises ImageError, naming the file, for one that is missing, broken or cut short.
    """
    try:
        with Image.open(path) as image:
            # A JPEG decodes at a half, a quarter or an eighth of its size for little more than that share of the time.
            image.draft("RGB", (2 * image_size, 2 * image_size))
            return fit_image(image, image_size=image_size)
    except (
        Exception
    ) as error:  # PIL's plug-ins raise many kinds on broken files, struct.error and SyntaxError included.
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


@dataclass(slots=True)
class FolderListing:
    """Which files exist, found by listing each folder once: a stat for each of 100,000 files takes minutes on NFS."""

    _names: dict[Path, frozenset[str]] = field(default_factory=dict)

    def has(self, path: Path) -> bool:
        """Whether ``path`` is in its folder."""
        names = self._names.get(path.parent)
        if names is None:
            try:
                names = frozenset(os.listdir(path.parent))
            except (OSError, ValueError):  # a name with a zero byte is a ValueError
                names = frozenset()
            self._names[path.parent] = names
        return path.name in names
