"""Stdlib: the embedded text, the sources of Python's own standard library. Real, ragged, and always there."""

from __future__ import annotations

import hashlib
import itertools
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.text import TextData
from tasks.data.text_decoding import TextError, leave_out, read_text

UNITS = ("definition", "file")
DEFINITION = re.compile(r"^(?:@[^\n]*\n)*(?:async def |def |class )", re.MULTILINE)
"""A function or class at the left margin, with its decorators."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders that are not the library itself."""


@dataclass(kw_only=True, slots=True)
class Stdlib(TextData):
    """Python's standard library as it is installed here: some 13 MB, which differ from one Python to the next."""

    unit: str = "definition"
    """What a document is: a top-level ``definition`` (function or class; the code before the first one is a document
    too), or a ``file``."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        TextData.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        if self.unit not in UNITS:
            raise ValueError(f"task.data.unit={self.unit!r} is not one of {UNITS}")

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield documents, file by file in the order of a hash of their paths, so that a few are a fair sample."""
        folder = self._folder()
        relative = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        names = [name for name in relative if not LEFT_OUT.intersection(name.split("/")[:-1])]
        if not names:
            raise ValueError(f"{folder} holds no Python sources; take task/data=text or task/data=json_lines")
        for name in sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest()):
            try:
                text = read_text(relative[name], encoding="utf-8")
            except TextError as error:
                leave_out(error, "file does not decode", skipped)
                continue
            yield from ((f"{name}:{number}", part) for number, part in enumerate(self._parts(text)))

    def place(self) -> str:
        """Name the library."""
        return "Python's standard library"

    def _folder(self) -> Path:
        return Path(sysconfig.get_path("stdlib"))

    def _parts(self, text: str) -> list[str]:
        if self.unit == "file":
            return [text] if text.strip() else []  # an empty __init__.py is nothing that was left out
        starts = [match.start() for match in DEFINITION.finditer(text)]
        edges = [0, *(start for start in starts if start), len(text)]
        return [part for begin, end in itertools.pairwise(edges) if (part := text[begin:end]).strip()]
