"""Labelled shapes: the embedded data set, one shape an image, its class its kind and colour. Needs no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.checks import require_at_least
from tasks.data.labelled_data import LabelledData, LabelledExamples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class LabelledShapes(LabelledData):
    """Scenes of one shape drawn by code, in 30 classes; scene ``i`` depends on the seed and ``i`` alone."""

    train_images: int = 16384
    """Training images."""
    val_images: int = 256
    """Validation images; none of them is a training image."""
    distinct: int | None = None
    """Different training images: image ``i`` is image ``i % distinct`` once more. They are drawn once and kept in
    memory (3 bytes a pixel), so that loading does not hold up a GPU; what is learned is then those images.
    None: all differ, each is drawn whenever it is asked for."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        LabelledData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_at_least("task.data.train_images", self.train_images, 1)
        require_at_least("task.data.val_images", self.val_images, 1)
        require_at_least("task.data.distinct", self.distinct, 1)

    def class_names(self) -> list[str]:
        """Colour and kind of each class."""
        from tasks.data.shape_scenes import COLOURS, SHAPES

        return [f"{colour} {kind}" for kind in SHAPES for colour in COLOURS]

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        """Training and validation images."""
        train: Callable[[int], tuple[Tensor, int]] = LabelledScenes(f"{seed}/train", image_size)
        if self.distinct is not None:
            from tasks.data.labelled_memory import KeptImages

            train = KeptImages(train, count=min(self.distinct, self.train_images), image_size=image_size)
        place = "the embedded shapes"
        return (
            LabelledExamples(count=self.train_images, item=train, place=place),
            LabelledExamples(count=self.val_images, item=LabelledScenes(f"{seed}/val", image_size), place=place),
        )


@dataclass(frozen=True, slots=True)
class LabelledScenes:
    """The scenes ``key/0``, ``key/1``, ... of one shape."""

    key: str
    size: int

    def __call__(self, index: int) -> tuple[Tensor, int]:
        """Draw scene ``index`` as uint8 [3, size, size]; returns it with its class."""
        from tasks.data.image_files import to_tensor
        from tasks.data.shape_scenes import COLOURS, SHAPES, make_scene

        scene = make_scene(f"{self.key}/{index}", max_objects=1)
        (shape,) = scene.shapes
        label = SHAPES.index(shape.kind) * len(COLOURS) + list(COLOURS).index(shape.colour)
        return to_tensor(scene.draw(self.size)), label
