"""JsonLines: text in a file of JSON objects, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.text import Documents, TextData
from tasks.data.text_decoding import TextError, leave_out


@dataclass(kw_only=True, slots=True)
class JsonLines(TextData):
    """A JSON lines file, UTF-8: one object a line, one document an object."""

    file: str = ""
    """File of training documents."""
    key: str = "text"
    """Key of the text within an object."""
    val_file: str = ""
    """File of validation documents; empty: a share of the lines is held out."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or missing."""
        TextData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        if not self.file:
            raise ValueError("task.data.file='' must name a JSON lines file")

    def documents(self, *, seed: int) -> tuple[Documents, Documents]:
        """Read both splits. Raises ValueError, naming file and line, when no line can be used."""
        if not self.val_file:
            return TextData.documents(self, seed=seed)
        skipped: dict[str, int] = {}
        sides = [
            [text for _, text in self._read(Path(file), skipped) if text.strip()][: self.max_documents]
            for file in (self.file, self.val_file)
        ]
        for file, texts in zip((self.file, self.val_file), sides, strict=True):
            if not texts:
                raise ValueError(f"{file} holds no text")
        return Documents(texts=sides[0], place=self.file, skipped=skipped), Documents(
            texts=sides[1], place=self.val_file
        )

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the documents; a line stays on its side when lines are appended."""
        return self._read(Path(self.file), skipped)

    def place(self) -> str:
        """The file, as given."""
        return self.file

    def tokenizer_folder(self) -> Path:
        """The folder of the training file."""
        return Path(self.file).parent

    def _read(self, file: Path, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        first_error: TextError | None = None
        read = 0
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    try:
                        text = self._text(line, place=f"{file} line {number}")
                    except TextError as error:
                        first_error = first_error or error
                        leave_out(error, "broken line", skipped)
                        continue
                    read += 1
                    yield str(number), text
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None
        if first_error is not None and not read:
            raise ValueError(f"{first_error}; no line of it can be used")

    def _text(self, line: bytes, *, place: str) -> str:
        try:
            # utf-8-sig: only the first line can begin with a byte order mark.
            item = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise TextError(f"{place} is not UTF-8 ({error.reason})") from None
        except json.JSONDecodeError as error:
            raise TextError(f"{place} is not JSON ({error.msg} at column {error.colno})") from None
        except RecursionError:
            raise TextError(f"{place} is not JSON that can be read (nested too deeply)") from None
        if not isinstance(item, dict):
            raise TextError(f"{place} is no JSON object but a {type(item).__name__}")
        if self.key not in item:
            has = ", ".join(map(repr, item)) or "none"
            raise TextError(f"{place} has no key {self.key!r} (task.data.key); it has {has}")
        if not isinstance(item[self.key], str):
            raise TextError(f"{place}: {self.key!r} is no text but a {type(item[self.key]).__name__}")
        return str(item[self.key])
