"""Configuration that every source of labelled images shares, and what a source hands to the data module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.data.loading import Loading

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class LabelledExamples:
    """One split."""

    count: int
    """Examples."""
    item: Callable[[int], tuple[Tensor, int]]
    """Index of an example to its uint8 image [3, H, W] and its class; raises ``ImageError`` for an image that does
    not decode."""
    place: str
    """Where the examples come from, for messages: a folder or a name."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Items already left out, by reason."""


@dataclass(kw_only=True, slots=True)
class LabelledData(Loading):
    """Base of every source of labelled images."""

    def class_names(self) -> list[str]:
        """Classes of the data; the label of an image is the index of its class.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def splits(self, *, seed: int, image_size: int) -> tuple[LabelledExamples, LabelledExamples]:
        """List training and validation examples with images of ``image_size`` pixels square.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError
