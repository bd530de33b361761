"""Where text comes from: files, JSON lines, Python's standard library; and how documents are split and laid out."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tasks.base import Loading, require_choice, require_fields, require_share

Named = Iterable[tuple[str, str]]
"""Name and text of each document; the name decides on which side it falls."""


@dataclass(kw_only=True, slots=True)
class TextData(Loading):
    """Base of every source of text.

    A source says how documents are read (``read``); how they are split and made into rows is the same for all.
    """

    num_workers: int | None = 0
    """Loader processes a device; null = one less than this process' cores, at most 8. A row is a slice of memory, which
    no process makes faster than the training's own."""
    packing: str = "packed"
    """``packed``: documents one after the other, cut into rows of ``max_tokens`` positions, all of them useful;
    ``documents``: one document a row, ragged, what is beyond ``max_tokens`` positions cut off and counted; or
    ``packed_documents``: such documents one after the other in one row a batch, each for itself. The row has the
    positions of ``batch_size`` documents of mean length, as a multiple of 128."""
    max_tokens: int | None = None
    """Positions of a packed row, most positions of a document; null = as many as the network takes."""
    pad_to: int | None = None
    """Positions of every batch of ``documents``, at most ``max_tokens``; null = as many as its longest one needs."""
    max_documents: int | None = None
    """Most documents to read, both splits together; null = all. A fixed choice, the same in every run."""
    val_share: float = 0.02
    """Share of the documents held out for validation, at least one; the same documents in every run. Of a source that
    is one document, its end."""

    def __post_init__(self) -> None:
        Loading.__post_init__(self)
        require_choice("task.data.packing", self.packing, ("packed", "documents", "packed_documents"))
        require_fields("task.data", self, max_tokens=2, pad_to=2, max_documents=2)
        require_share("task.data.val_share", self.val_share)
        if self.pad_to is not None and self.packing != "documents":
            raise ValueError(f"task.data.pad_to={self.pad_to} needs task.data.packing=documents, not {self.packing}")

    def read(self) -> Named:
        """All documents. Raises ValueError, naming the file, for a source that cannot be used."""
        raise NotImplementedError

    def documents(self) -> tuple[list[str], list[str]]:
        """Training and validation documents, one text each, the same ones in every run; blank ones are left out.

        Raises ValueError, naming the file, for a source that cannot be used, and for too little text on a side.
        """
        named = [(name, text) for name, text in itertools.islice(self.read(), self.max_documents) if text.strip()]
        if len(named) == 1:
            ((_, only),) = named
            at = min(max(1, round(len(only) * (1 - self.val_share))), len(only) - 1)
            train, val = [only[:at]], [only[at:]]
        else:
            held = held_out([name for name, _ in named], share=self.val_share)
            train, val = ([text for name, text in named if (name in held) is out] for out in (False, True))
        if not any(train) or not any(val):
            raise ValueError(f"{self.place()} holds too little text to train on and to validate")
        return train, val


def held_out(names: Iterable[str], *, share: float) -> set[str]:
    """Names that are held out for validation: ``share`` of them, at least one and never all.

    Chosen by a hash: a document stays on its side when others are added, and wherever its folder is.
    """
    hashes = {name: hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest() for name in names}
    count = sum(int.from_bytes(each) < share * 2**64 for each in hashes.values())
    return set(sorted(hashes, key=lambda name: hashes[name])[: min(max(1, count), len(hashes) - 1)])


def read_text(file: Path) -> str:
    """Read UTF-8, with a byte order mark or without; line ends become newlines. Raises ValueError, naming the file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text ({error})") from None


@dataclass(kw_only=True, slots=True)
class TextFiles(TextData):
    """UTF-8 files: of text, a document each, and of JSON lines (``.jsonl``), a document a line."""

    source: ClassVar[str] = "path"
    path: str = ""
    """A file, or a folder: its ``.txt`` and ``.jsonl`` files at any depth."""
    key: str = "text"
    """Key of the text within the object of a JSON line."""

    def read(self) -> Named:
        """Documents, named by their path below the folder."""
        root = Path(self.path)
        below = (one for one in root.rglob("*") if one.suffix in (".txt", ".jsonl") and one.is_file())
        files = [root] if root.is_file() else sorted(below)
        if not files:
            raise ValueError(f"task.data.path={self.path!r} is not a file, or a folder with .txt or .jsonl files")
        for file in files:
            name, text = file.name if file == root else file.relative_to(root).as_posix(), read_text(file)
            if file.suffix != ".jsonl":
                yield name, text
                continue
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield f"{name}:{number}", self._of_line(line, f"{file} line {number}")

    def _of_line(self, line: str, place: str) -> str:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON ({error})") from None
        text = item.get(self.key) if isinstance(item, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{place} has no text under the key {self.key!r} (task.data.key)")
        return text.encode(errors="replace").decode()  # a lone surrogate is not text to a tokenizer


DEFINITION = re.compile(r"^(?:@[^\n]*\n)*(?:async def |def |class )", re.MULTILINE)
"""A function or class at the left margin, with its decorators."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(kw_only=True, slots=True)
class Stdlib(TextData):
    """Python's standard library as it is installed here: some 13 MB, which differ from one Python to the next.

    A document is a top-level function or class; the code before a file's first one is a document too.
    """

    def read(self) -> Named:
        """Documents, file by file in the order of a hash of their paths, so that a few are a fair sample."""
        folder = Path(sysconfig.get_path("stdlib"))
        names: list[str] = []
        for place, below, files in os.walk(folder):
            below[:] = set(below) - LEFT_OUT  # what is installed there is not looked through
            names += [Path(place, name).relative_to(folder).as_posix() for name in files if name.endswith(".py")]
        names.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
        for name in names:
            with contextlib.suppress(ValueError):  # a few are not UTF-8
                for number, part in enumerate(definitions(read_text(folder / name))):
                    yield f"{name}:{number}", part


def definitions(text: str) -> list[str]:
    """A Python source in pieces, which joined are the whole but for blank ones."""
    starts = [match.start() for match in DEFINITION.finditer(text)]
    edges = [0, *(start for start in starts if start), len(text)]
    return [part for begin, end in itertools.pairwise(edges) if (part := text[begin:end]).strip()]
