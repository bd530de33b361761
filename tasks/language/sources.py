"""Sources of text: Python's standard library, text files, JSON lines."""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tasks.base import Loading, held_out, require_choice, require_fields, require_share
from tasks.resources import cache_folder

PACKINGS = ("packed", "documents")
BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")


@dataclass(kw_only=True, slots=True)
class Documents:
    """One split of a source of text."""

    texts: list[str]
    """One text a document, none of them blank."""
    place: str
    """Where the documents come from, for messages: a folder or a file."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Items already left out, by reason."""


@dataclass(kw_only=True, slots=True)
class TextData(Loading):
    """Base of every source of text.

    A source says how documents are read (``read``); how they are split and made into rows is the same for all.
    """

    num_workers: int | None = 0
    """Loader processes a device; None: one less than this process' cores, at most 8. A row is a slice of memory, which
    no process makes faster than the training's own."""
    packing: str = "packed"
    """``packed``: documents one after the other, cut into rows of ``max_tokens`` positions, all of them useful; or
    ``documents``: one document a row, ragged, what is beyond ``max_tokens`` positions cut off and counted."""
    max_tokens: int | None = None
    """Positions of a packed row, most positions of a document; None: as many as the network takes."""
    pad_to: int | None = None
    """Positions of every batch of ``documents``, at most ``max_tokens``; None: as many as its longest one needs."""
    max_documents: int | None = None
    """Most documents to read, both splits together; None: all. A fixed choice, the same in every run."""
    val_share: float = 0.02
    """Share of the documents held out for validation, at least one; the same documents in every run. Of a source that
    is one document, its end."""

    def __post_init__(self) -> None:
        Loading.__post_init__(self)
        require_choice("task.data.packing", self.packing, PACKINGS)
        require_fields("task.data", self, max_tokens=2, pad_to=2, max_documents=2)
        require_share("task.data.val_share", self.val_share, below_one=True)
        if self.pad_to is not None and self.packing == "packed":
            raise ValueError(f"task.data.pad_to={self.pad_to} needs task.data.packing=documents: packed rows are full")

    def documents(self) -> tuple[Documents, Documents]:
        """Read training and validation documents, the same ones in every run.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        skipped: dict[str, int] = {}
        named = self.read(skipped)
        if (held := self.validation(skipped)) is None:
            return self.split(list(itertools.islice(named, self.max_documents)), skipped)
        val_documents, val_place = held
        sides = []
        for documents, place in ((named, self.place()), (val_documents, val_place)):
            texts = [text for _, text in documents if text.strip()][: self.max_documents]
            if not texts:
                raise ValueError(f"{place} holds no text")
            sides.append(Documents(texts=texts, place=place))
        sides[0].skipped = skipped
        return sides[0], sides[1]

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of each document; the name decides on which side it falls. Counts what it leaves out.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def validation(self, skipped: dict[str, int]) -> tuple[Iterator[tuple[str, str]], str] | None:
        """Validation documents where the user names them, and their place; None: some are held out."""
        return None

    def place(self) -> str:
        """Where the documents come from, for messages."""
        raise NotImplementedError

    def split(self, named: list[tuple[str, str]], skipped: dict[str, int]) -> tuple[Documents, Documents]:
        """Hold out a share of the documents by a hash of their names; blank ones are left out and counted.

        Raises ValueError when fewer than one document a side is left.
        """
        kept = [(name, text) for name, text in named if not text.isspace() and text]
        if len(kept) < len(named):
            skipped["blank document"] = skipped.get("blank document", 0) + len(named) - len(kept)
        if len(kept) == 1:
            text = kept[0][1]
            at = min(max(1, round(len(text) * (1 - self.val_share))), len(text) - 1)
            train, val = [text[:at]], [text[at:]]
        else:
            held = held_out({name: name for name, _ in kept}, share=self.val_share)
            train = [text for name, text in kept if name not in held]
            val = [text for name, text in kept if name in held]
        if not any(train) or not any(val):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "it is empty"
            raise ValueError(f"{self.place()} holds too little text to train on and to validate ({reasons})")
        return (
            Documents(texts=train, place=self.place(), skipped=skipped),
            Documents(texts=val, place=f"what is held out of {self.place()} (task.data.val_share={self.val_share})"),
        )

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer trained on these documents, and their tokens, are kept."""
        return cache_folder()


# UTF-32 before UTF-16: its little-endian mark begins with the other's.
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and the encodings that they announce."""


class TextError(ValueError):
    """A file that cannot be read as text; the message names it."""


def read_text(file: Path, *, encoding: str, option: str | None = None) -> str:
    """Read ``file``: by its byte order mark where it has one, else as ``encoding``; line ends become newlines.

    ``option`` is the one that chooses another encoding.

    Raises TextError, naming the file, when it cannot be read or is not text in that encoding.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TextError(f"{file} cannot be read ({error.strerror})") from None
    used = next((name for mark, name in MARKS if data.startswith(mark)), encoding)
    try:
        text = data.decode(used)
    except UnicodeDecodeError as error:
        hint = "" if option is None or used != encoding else f"; another one is chosen by {option}"
        raise TextError(f"{file} is not {used} text: byte {error.start} ({error.reason}){hint}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def readable(
    items: Iterable[tuple[str, Callable[[], str]]], reason: str, skipped: dict[str, int], *, none: str
) -> Iterator[tuple[str, str]]:
    """Names and texts of ``items``; one that raises TextError is printed and counted under ``reason``.

    Raises ValueError, the first error and ``none``, where not one can be read.
    """
    first_error, read = None, 0
    for name, load in items:
        try:
            text = load()
        except TextError as error:
            first_error = first_error or error
            skipped[reason] = skipped.get(reason, 0) + 1
            print(f"left out: {error}", file=sys.stderr, flush=True)
            continue
        read += 1
        yield name, text
    if first_error is not None and not read:
        raise ValueError(f"{first_error}{none}")


@dataclass(kw_only=True, slots=True)
class TextFiles(TextData):
    """Text files: one, all of a folder, or those that a pattern with wildcards matches."""

    path: str = ""
    """A file, a folder (with everything below it), or a pattern such as ``/data/**/*.md``."""
    suffix: str = ".txt"
    """How the names of a folder's text files end; a file or a pattern is taken as it is."""
    encoding: str = "utf-8"
    """Encoding of files without a byte order mark, by Python's name: ``latin-1`` takes anything without an error.
    Files with a mark (UTF-8, UTF-16, UTF-32) are read by it."""
    unit: str = "file"
    """What a document is: a ``file``, or a ``paragraph`` (blank lines between)."""
    val_path: str = ""
    """Validation text, as ``path``; empty: a share of the documents is held out."""

    def __post_init__(self) -> None:
        TextData.__post_init__(self)
        if not self.path:
            raise ValueError("task.data.path='' must name a text file, a folder or a pattern")
        require_choice("task.data.unit", self.unit, ("file", "paragraph"))
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ValueError(f"task.data.encoding={self.encoding!r} is not an encoding that Python knows") from None

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        return self._read("task.data.path", self.path, skipped)

    def validation(self, skipped: dict[str, int]) -> tuple[Iterator[tuple[str, str]], str] | None:
        return (self._read("task.data.val_path", self.val_path, skipped), self.val_path) if self.val_path else None

    def place(self) -> str:
        return self.path

    def tokenizer_folder(self) -> Path:
        """The folder of the text, or the last one before a wildcard."""
        path = _before_wildcard(Path(self.path))
        return path.parent if path.is_file() else path

    def _read(self, option: str, path: str, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        files, root = self._files(option, path)
        items = (
            (
                file.relative_to(root).as_posix(),
                partial(read_text, file, encoding=self.encoding, option="task.data.encoding"),
            )
            for file in files
        )
        none = f"; so it is with all {len(files)} files" if len(files) > 1 else ""
        for name, text in readable(items, "file does not decode", skipped, none=none):
            if self.unit == "file":
                yield name, text
            else:
                parts = [part for part in BLANK_LINES.split(text) if part.strip()]
                yield from ((f"{name}:{number}", part) for number, part in enumerate(parts))

    def _files(self, option: str, path: str) -> tuple[list[Path], Path]:
        given = Path(path)
        if given.is_dir():
            files = sorted(file for file in given.rglob(f"*{self.suffix}") if file.is_file())
            if not files:
                raise ValueError(
                    f"{option}={path!r} holds no files whose names end in {self.suffix!r} (task.data.suffix)"
                )
            return files, given
        if given.is_file():
            return [given], given.parent
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not files:
            found = "matches no file" if glob.has_magic(path) else "is not a file and not a folder"
            raise ValueError(f"{option}={path!r} {found}")
        return files, _before_wildcard(given)


def _before_wildcard(path: Path) -> Path:
    while glob.has_magic(str(path)):
        path = path.parent
    return path


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
        TextData.__post_init__(self)
        if not self.file:
            raise ValueError("task.data.file='' must name a JSON lines file")

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the documents; a line stays on its side when lines are appended."""
        return self._read(Path(self.file), skipped)

    def validation(self, skipped: dict[str, int]) -> tuple[Iterator[tuple[str, str]], str] | None:
        return (self._read(Path(self.val_file), skipped), self.val_file) if self.val_file else None

    def place(self) -> str:
        return self.file

    def tokenizer_folder(self) -> Path:
        return Path(self.file).parent

    def _read(self, file: Path, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        try:
            with file.open("rb") as lines:
                items = (
                    (str(number), partial(self._text, line, place=f"{file} line {number}"))
                    for number, line in enumerate(lines, 1)
                    if line.strip()
                )
                yield from readable(items, "broken line", skipped, none="; no line of it can be used")
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None

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
            raise TextError(f"{place} is not a JSON object but a {type(item).__name__}")
        if self.key not in item:
            has = ", ".join(map(repr, item)) or "none"
            raise TextError(f"{place} has no key {self.key!r} (task.data.key); it has {has}")
        if not isinstance(item[self.key], str):
            raise TextError(f"{place}: {self.key!r} is not text but a {type(item[self.key]).__name__}")
        return str(item[self.key])


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
        TextData.__post_init__(self)
        require_choice("task.data.unit", self.unit, ("definition", "file"))

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield documents, file by file in the order of a hash of their paths, so that a few are a fair sample."""
        folder = Path(sysconfig.get_path("stdlib"))
        relative = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        names = [name for name in relative if not LEFT_OUT.intersection(name.split("/")[:-1])]
        if not names:
            raise ValueError(f"{folder} holds no Python sources; take task/data=text or task/data=json_lines")
        names.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
        items = ((name, partial(read_text, relative[name], encoding="utf-8")) for name in names)
        for name, text in readable(items, "file does not decode", skipped, none=""):
            yield from ((f"{name}:{number}", part) for number, part in enumerate(self._parts(text)))

    def place(self) -> str:
        return "Python's standard library"

    def _parts(self, text: str) -> list[str]:
        if self.unit == "file":
            return [text] if text.strip() else []  # an empty __init__.py is nothing that was left out
        starts = [match.start() for match in DEFINITION.finditer(text)]
        edges = [0, *(start for start in starts if start), len(text)]
        return [part for begin, end in itertools.pairwise(edges) if (part := text[begin:end]).strip()]
