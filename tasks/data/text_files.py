"""TextFiles: a user's own text files; one document a file or a paragraph."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.text import Documents, TextData
from tasks.data.text_decoding import TextError, leave_out, read_text, require_encoding

UNITS = ("file", "paragraph")
BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")


@dataclass(kw_only=True, slots=True)
class TextFiles(TextData):
    """Text files: one, all of a folder, or those that a pattern with wildcards matches."""

    path: str = ""
    """A file, a folder (with everything below it), or a pattern such as ``/data/**/*.md``."""
    suffix: str = ".txt"
    """How the names of a folder's text files end; a file or a pattern is taken as it is."""
    encoding: str = "utf-8"
    """Encoding of files without a byte order mark, by Python's name: ``latin-1`` takes anything, and says so of
    nothing. Files with a mark (UTF-8, UTF-16, UTF-32) are read by it."""
    unit: str = "file"
    """What a document is: a ``file``, or a ``paragraph`` (blank lines between)."""
    val_path: str = ""
    """Validation text, as ``path``; empty: a share of the documents is held out."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or missing."""
        TextData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        if not self.path:
            raise ValueError("task.data.path='' must name a text file, a folder or a pattern")
        if self.unit not in UNITS:
            raise ValueError(f"task.data.unit={self.unit!r} is not one of {UNITS}")
        require_encoding("task.data.encoding", self.encoding)

    def documents(self, *, seed: int) -> tuple[Documents, Documents]:
        """Read both splits. Raises ValueError, naming the file, for text that cannot be used."""
        if not self.val_path:
            return TextData.documents(self, seed=seed)
        skipped: dict[str, int] = {}
        train = [text for _, text in self._read("task.data.path", self.path, skipped) if text.strip()]
        val = [text for _, text in self._read("task.data.val_path", self.val_path, skipped) if text.strip()]
        for path, texts in ((self.path, train), (self.val_path, val)):
            if not texts:
                raise ValueError(f"{path} holds no text")
        return (
            Documents(texts=train[: self.max_documents], place=self.path, skipped=skipped),
            Documents(texts=val[: self.max_documents], place=self.val_path),
        )

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the documents of all files."""
        return self._read("task.data.path", self.path, skipped)

    def place(self) -> str:
        """The path, as given."""
        return self.path

    def tokenizer_folder(self) -> Path:
        """The folder of the text, or the last one before a wildcard."""
        path = Path(self.path)
        while glob.has_magic(str(path)) or path.is_file():
            path = path.parent
        return path

    def _read(self, option: str, path: str, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        files, root = self._files(option, path)
        first_error: TextError | None = None
        read = 0
        for file in files:
            try:
                text = read_text(file, encoding=self.encoding, option="task.data.encoding")
            except TextError as error:
                first_error = first_error or error
                leave_out(error, "file does not decode", skipped)
                continue
            read += 1
            name = file.relative_to(root).as_posix()
            if self.unit == "file":
                yield name, text
                continue
            parts = [part for part in BLANK_LINES.split(text) if part.strip()]
            yield from ((f"{name}:{number}", part) for number, part in enumerate(parts))
        if first_error is not None and not read:
            raise ValueError(str(first_error) + (f"; so it is with all {len(files)} files" if len(files) > 1 else ""))

    def _files(self, option: str, path: str) -> tuple[list[Path], Path]:
        """Files in the order of their names, and the folder that names begin at."""
        given = Path(path)
        if given.is_dir():
            files, what = sorted(file for file in given.rglob(f"*{self.suffix}") if file.is_file()), "holds no"
            if not files:
                raise ValueError(
                    f"{option}={path!r} {what} files whose names end in {self.suffix!r} (task.data.suffix)"
                )
            return files, given
        if given.is_file():
            return [given], given.parent
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not files:
            found = "matches no file" if glob.has_magic(path) else "is no file and no folder"
            raise ValueError(f"{option}={path!r} {found}")
        root = given
        while glob.has_magic(str(root)):
            root = root.parent
        return files, root
