"""Files of values: written whole or not at all, read into dataclasses with every type checked. Imports neither torch
nor Lightning."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 and C1, of which escape sequences are made), those that turn the direction of text around
(https://trojansource.codes), line separators, and halves of characters that no output can encode."""
_hints = functools.cache(get_type_hints)
TEXTS = frozenset({"reason", "notes", "eager_parts", "eager_evaluations", "report", "events"})
"""Keys below which a text may have several lines; elsewhere a line break would forge lines of its own."""


def nan_to_none(value: Any) -> Any:
    """``value`` with None for every number in it that JSON has no word for: NaN, infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: nan_to_none(one) for key, one in value.items()}
    return [nan_to_none(one) for one in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def written_whole(target: Path, mode: str) -> Iterator[IO[Any]]:
    """A file to write in ``mode`` (``w``: UTF-8 text, ``wb``: bytes) that becomes ``target`` when the block ends.

    A reader sees the old file or the new one, never a half; when the block raises, the old one stays, alone. A link
    stays one, and a device or a pipe (``/dev/stdout``) is written to.
    """
    if target.exists() and not target.is_file() and not target.is_dir():
        with target.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        return
    if target.is_symlink() and target.exists():
        target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:  # of a full disk, it names no file; one of a message alone has no place for it
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def dataclass_from_json(kind: type[Made], values: Any, path: str = "") -> Made:
    """A ``kind``, which is a dataclass, from a JSON object. Raises TypeError that names the first value that does not
    fit (``events[3].reason``), or what is missing; what a ``kind`` has no field for is left out."""
    if not isinstance(values, dict):
        raise TypeError(f"{path} is {type_name(values)}, not an object")
    hints = _hints(kind)  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    return kind(**{name: _value(hints[name], values[name], f"{prefix}{name}") for name in values if name in hints})


def _value(hint: Any, given: Any, path: str) -> Any:
    if hint is Any:
        return given
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if given is None or (isinstance(given, float) and not math.isfinite(given)):
            return None
        (hint,) = (part for part in parts if part is not type(None))  # our fields have one type, or it and None
        return _value(hint, given, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return dataclass_from_json(hint, given, path)
    if origin is list and isinstance(given, list):
        return [_value(parts[0], each, f"{path}[{place}]") for place, each in enumerate(given)]
    if origin is dict and isinstance(given, dict):
        return {name: _value(parts[1], each, f"{path}.{name}") for name, each in given.items()}
    if hint is float and given is None:  # JSON has no NaN
        return math.nan
    if isinstance(given, int) and abs(given) > sys.maxsize:
        raise TypeError(f"{path} is out of range")
    kinds = (int, float) if hint is float else hint
    if origin is not None or not isinstance(given, kinds) or (isinstance(given, bool) and hint is not bool):
        raise TypeError(f"{path} is {type_name(given)}, not {hint.__name__}")
    return given


def type_name(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def printable(value: Any, *, lines: bool = False) -> Any:
    """``value`` as read from JSON, its strings and keys without what a terminal or browser would act on.

    A record can be anyone's: escape sequences in it would set the title, clear the screen or forge a comparison.

    Args:
        value: Nested lists and dictionaries, strings, numbers.
        lines: Whether line breaks and tabs may stay.
    """
    if isinstance(value, str):
        text = CONTROL.sub("", value)
        return text if lines else " ".join(re.split(r"[\n\t]+", text))
    if isinstance(value, list):
        return [printable(part, lines=lines) for part in value]
    if isinstance(value, dict):
        return {printable(key): printable(part, lines=lines or key in TEXTS) for key, part in value.items()}
    return value
