"""Captioning: describe an image in words, with a Vision Transformer and a text decoder with cross attention.

Captioned images are drawn shapes, noise with captions of lognormal lengths, or COCO's layout.
"""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Loading, Ragged, TrainedTask, require_fields
from tasks.captioning.size import CaptionerSize
from tasks.special_tokens import PAD

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn

    Examples = tuple[list[str], Callable[[int], Tensor]]


@dataclass(kw_only=True, slots=True)
class CaptionData(Loading):
    """Base of every source of captioned images."""

    pad_to: int | None = None
    """Text positions of every batch; null = as many as the longest caption of the batch needs. Longer captions are
    left out and counted."""

    def __post_init__(self) -> None:
        Loading.__post_init__(self)
        require_fields("task.data", self, pad_to=2)

    def split(self, name: str, *, seed: int, image_size: int) -> Examples:
        """Captions for ``train`` or ``val``, one an example; and what returns the image of an example's number, uint8
        [3, ``image_size``, ``image_size``].

        Both raise ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError


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

    def count_of(self, split: str) -> int:
        return self.train_images if split == "train" else self.val_images


@dataclass(kw_only=True, slots=True)
class Shapes(GeneratedCaptions):
    """The embedded data set: coloured shapes drawn by code, with captions of very different lengths."""

    max_objects: int = 9
    """Most shapes in a scene, 1 to 9; more shapes make longer captions."""

    def __post_init__(self) -> None:
        GeneratedCaptions.__post_init__(self)
        if not 1 <= self.max_objects <= 9:
            raise ValueError(f"task.data.max_objects={self.max_objects} must be 1 to 9")

    def split(self, name: str, *, seed: int, image_size: int) -> Examples:
        from tasks.images import make_scene, scene_image

        key, most = f"{seed}/{name}", self.max_objects
        captions = [make_scene(f"{key}/{index}", max_objects=most).caption() for index in range(self.count_of(name))]
        return captions, partial(scene_image, key, most, image_size)


WORDS = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeio", "rstvz", "uy")]
"""Each becomes one token once the tokenizer has a few thousand."""
MEDIAN, SIGMA = 60.0, 0.6
"""Median of the lengths of generated captions in text positions, and standard deviation of their logarithm."""
SHORTEST, LONGEST = 4, 256
"""Positions of the shortest and the longest caption; what would be shorter or longer gets this length."""


@dataclass(kw_only=True, slots=True)
class Lognormal(GeneratedCaptions):
    """Noise with captions of lognormal lengths, as the documents and sentences of real corpora have them.

    What a model can learn from them is the order of words within a caption.
    """

    def split(self, name: str, *, seed: int, image_size: int) -> Examples:
        captions = [_lognormal_caption(f"{seed}/{name}/{index}") for index in range(self.count_of(name))]
        return captions, partial(_noise, f"{seed}/{name}", image_size)


def _lognormal_caption(key: str) -> str:
    draw = random.Random(key)
    positions = round(draw.lognormvariate(0.0, SIGMA) * MEDIAN)
    words = min(max(positions, SHORTEST), LONGEST) - 1  # and the end
    start, stride = draw.randrange(len(WORDS)), draw.randrange(1, 8)
    return " ".join(WORDS[(start + stride * index) % len(WORDS)] for index in range(words))


@dataclass(kw_only=True, slots=True)
class Coco(CaptionData):
    """Captioned images in COCO's layout: ``annotations/captions_train2017.json`` and ``train2017/``, the same with
    ``val``, of any year; of several the latest.
    """

    source: ClassVar[str] = "root"
    root: str = ""
    """The folder."""

    def split(self, name: str, *, seed: int, image_size: int) -> Examples:
        file = max(Path(self.root, "annotations").glob(f"captions_{name}*.json"), default=None)
        if file is None:
            raise ValueError(f"task.data.root={self.root!r} has no annotations/captions_{name}*.json")
        folder = Path(self.root, file.stem.removeprefix("captions_"))
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder of images")
        try:
            content = json.loads(file.read_bytes())
            files = {image["id"]: folder / image["file_name"] for image in content["images"]}
            paths = [files[each["image_id"]] for each in content["annotations"]]
            # A lone surrogate, which JSON can hold, is not text to a tokenizer.
            texts = [str(each["caption"]).encode(errors="replace").decode() for each in content["annotations"]]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a COCO caption file ({type(error).__name__}: {error})") from None
        if not texts:
            raise ValueError(f"{file} has no annotations")
        return [" ".join(text.split()) for text in texts], partial(_image, paths, image_size)


def _image(paths: list[Path], image_size: int, index: int) -> Tensor:
    from tasks.images import read_image

    return read_image(paths[index], image_size=image_size)


def _noise(key: str, image_size: int, index: int) -> Tensor:
    import torch

    # Not hash(): that differs from process to process.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}/{index}".encode()))
    return torch.randint(0, 256, (3, image_size, image_size), dtype=torch.uint8, generator=generator)


@dataclass(kw_only=True, slots=True)
class Captioning(TrainedTask):
    """Image captioning: next-token prediction over captions, given the image."""

    name: ClassVar[str] = "captioning"
    accuracy: ClassVar[str] = "val/token_accuracy"
    inputs: ClassVar[tuple[str, ...]] = ("images", "tokens")
    blocks: ClassVar[tuple[str, ...]] = ("net.encoder.blocks", "net.decoder.blocks")
    # Not decoder.embed: 0.2% of a step for 1.5 s of compiling, measured on an H200 (2026-11-21).
    parts: ClassVar[tuple[str, ...]] = ("net.encoder.embed", "net.tail")

    size: CaptionerSize = field(default_factory=CaptionerSize)
    """Dimensions of the network."""
    data: CaptionData = field(default_factory=Shapes)
    """Captioned images: the embedded shapes, noise with captions of lognormal lengths, or COCO's layout."""

    def __post_init__(self) -> None:
        TrainedTask.__post_init__(self)
        if self.data.pad_to is not None and self.data.pad_to > self.size.max_tokens:
            raise ValueError(
                f"task.data.pad_to={self.data.pad_to} must be at most task.size.max_tokens={self.size.max_tokens}"
            )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.captioning.data import CaptionDataModule

        return CaptionDataModule(self, seed=seed)

    def build_net(self) -> nn.Module:
        from tasks.captioning.model import CaptionNet

        return CaptionNet(self.size)

    def default_learning_rate(self) -> float:
        """About 3e-3 for tiny and 2.6e-4 for base: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return 0.2 / self.size.decoder_width

    def ragged(self) -> Ragged:
        """The model reads all tokens but the last and predicts all but the first."""
        return (("tokens", 1, PAD, 1),)

    def count(self, batch: Any) -> BatchCounts:
        """Count a CaptionBatch: images, text positions, and those that are not padding."""
        images, positions = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        return BatchCounts(samples=images, tokens=images * positions, useful_tokens=batch.useful_tokens)

    def max_positions(self) -> int:
        return self.size.max_tokens

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        images = torch.zeros(rows, 3, self.size.image_size, self.size.image_size, dtype=torch.uint8)
        return images, torch.zeros(rows, positions + 1, dtype=torch.long)
