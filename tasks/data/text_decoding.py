"""Text of a file in any of the encodings that files say by themselves, or in the one that is asked for."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

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


def require_encoding(path: str, encoding: str) -> None:
    """Raise ValueError, naming the option, for an encoding that Python does not know."""
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ValueError(f"{path}={encoding!r} is not an encoding that Python knows") from None


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


def leave_out(error: TextError, reason: str, skipped: dict[str, int]) -> None:
    """Count an item that is left out, and say which one."""
    skipped[reason] = skipped.get(reason, 0) + 1
    print(f"left out: {error}", file=sys.stderr, flush=True)
