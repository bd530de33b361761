"""Csv: images with captions listed in a CSV file, one caption a row."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from tasks.checks import require_share
from tasks.data.captions import CaptionData, Examples
from tasks.data.file_examples import FileCaption, file_examples, hold_out


@dataclass(kw_only=True, slots=True)
class Csv(CaptionData):
    """Captioned images of a CSV file with a header line, UTF-8."""

    file: str = ""
    """CSV file of training captions."""
    image_column: str = "image"
    """Column with the image's path."""
    caption_column: str = "caption"
    """Column with the caption; an image with several captions has several rows."""
    image_root: str = ""
    """Folder that relative image paths begin at; empty: the folder of the CSV file."""
    delimiter: str = ","
    """One character between columns; ``\\t`` for a tab."""
    val_file: str = ""
    """CSV file of validation captions; empty: a share of the images is held out."""
    val_share: float = 0.02
    """Share of the images held out for validation where no validation file is given; the same images in every run."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or missing."""
        CaptionData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        require_share("task.data.val_share", self.val_share, below_one=True)
        if not self.file:
            raise ValueError("task.data.file='' must name a CSV file")
        if len(self._delimiter()) != 1:
            raise ValueError(f"task.data.delimiter={self.delimiter!r} must be one character")

    def splits(self, *, seed: int, image_size: int) -> tuple[Examples, Examples]:
        """List both splits. Raises ValueError, naming the file, for one that cannot be used."""
        train = self._read(Path(self.file))
        if self.val_file:
            val = self._read(Path(self.val_file))
        else:
            train, val = hold_out(train, share=self.val_share)
        return (
            file_examples(train, place=self.file, image_size=image_size),
            file_examples(val, place=self.val_file or self.file, image_size=image_size),
        )

    def tokenizer_folder(self) -> Path:
        """The folder of the training file."""
        return Path(self.file).parent

    def _delimiter(self) -> str:
        return "\t" if self.delimiter == "\\t" else self.delimiter

    def _read(self, file: Path) -> list[FileCaption]:
        if self.image_root and not Path(self.image_root).is_dir():
            raise ValueError(f"task.data.image_root={self.image_root!r} is not a folder")
        folder = Path(self.image_root) if self.image_root else file.parent
        try:
            # utf-8-sig: spreadsheets begin files with a byte order mark, which would join the first column's name.
            with file.open(encoding="utf-8-sig", newline="") as lines:
                rows = csv.DictReader(lines, delimiter=self._delimiter())
                columns = list(rows.fieldnames or [])
                for name in (self.image_column, self.caption_column):
                    if name not in columns:
                        raise ValueError(
                            f"{file} has no column {name!r}; it has {', '.join(map(repr, columns)) or 'none'}"
                        )
                return [
                    FileCaption(folder / (row[self.image_column] or ""), row[self.caption_column] or "") for row in rows
                ]
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a UTF-8 CSV file ({error})") from None
