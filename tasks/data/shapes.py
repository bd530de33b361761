"""Shapes: the embedded data set, coloured shapes with captions of very different lengths. Needs no files."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.checks import require_at_least
from tasks.data.captions import CaptionData, Examples
from tasks.room import LEAST_OF_EXAMPLE, require_memory


@dataclass(kw_only=True, slots=True)
class Shapes(CaptionData):
    """Scenes drawn by code; scene ``i`` depends on the seed and ``i`` alone."""

    train_images: int = 16384
    """Training scenes."""
    val_images: int = 256
    """Validation scenes; none of them is a training scene."""
    max_objects: int = 9
    """Most shapes in a scene, 1 to 9; more shapes make longer captions."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        CaptionData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_at_least("task.data.train_images", self.train_images, 1)
        require_at_least("task.data.val_images", self.val_images, 1)
        if not 1 <= self.max_objects <= 9:
            raise ValueError(f"task.data.max_objects={self.max_objects} must be 1 to 9")

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """Training and validation scenes."""
        given = f"task.data.train_images={self.train_images}, task.data.val_images={self.val_images}"
        require_memory(given, LEAST_OF_EXAMPLE * (self.train_images + self.val_images))
        from tasks.data.shape_scenes import SceneImages

        train, val = (
            SceneImages(key=f"{seed}/{split}", count=count, max_objects=self.max_objects, image_size=image_size)
            for split, count in (("train", self.train_images), ("val", self.val_images))
        )
        place = "the embedded shapes"
        return (
            Examples(captions=train.captions(), image=train, place=place),
            Examples(captions=val.captions(), image=val, place=place),
        )
