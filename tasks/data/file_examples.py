"""Examples whose images are files: missing ones are left out and counted, a share can be held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tasks.data.captions import Examples
from tasks.data.hold_out import held_out


class FileCaption(NamedTuple):
    """One caption of one image file."""

    path: Path
    """The image."""
    caption: str
    """Its caption, as written in the file."""


def file_examples(items: Sequence[FileCaption], *, place: str, image_size: int) -> Examples:
    """Make a split of the items whose image exists, with images of ``image_size`` pixels square."""
    from tasks.data.image_files import FolderListing, ImageFiles

    listing = FolderListing()
    present = [item for item in items if listing.has(item.path)]
    first: dict[Path, int] = {}
    image_ids = [first.setdefault(item.path, index) for index, item in enumerate(present)]
    missing = len(items) - len(present)
    return Examples(
        captions=[" ".join(item.caption.split()) for item in present],
        image=ImageFiles(paths=[item.path for item in present], image_size=image_size),
        place=place,
        image_ids=image_ids,
        skipped={"image missing": missing} if missing else {},
    )


def hold_out(items: Sequence[FileCaption], *, share: float) -> tuple[list[FileCaption], list[FileCaption]]:
    """Split into (training, validation): the given share of images, at least one, chosen by a hash of the file name.

    All captions of an image fall on one side, and an image stays on its side when others are added or
    the folder moves.
    """
    held = held_out({item.path: item.path.name for item in items}, share=share)
    return [item for item in items if item.path not in held], [item for item in items if item.path in held]
