"""Configuration that every source of captioned images shares, and what a source hands to the data module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.checks import require_at_least
from tasks.data.cache_files import cache_folder
from tasks.data.loading import Loading

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
        """Raise ValueError for values out of range."""
        Loading.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_at_least("task.data.pad_to", self.pad_to, 2)

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """List training and validation examples with images of ``image_size`` pixels square.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer trained on these captions is kept."""
        return cache_folder()
