"""Typed: JSON from a file becomes dataclasses; a value of another type than its field declares is named, not passed on.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.printable import printable

Made = TypeVar("Made")
MOST_DEPTH = 50
"""Levels of lists and mappings within each other; ours have about six."""


def read(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``file``, without control characters. Raises ValueError, naming the file, where it cannot be
    read or is no ``what``."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        _limit(values, MOST_DEPTH)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{file}: not {what} (more than {MOST_DEPTH} levels of nesting)") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not {what} (byte {error.start} is not UTF-8)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not {what} ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not {what} (the whole is {_name(values)}, not an object)")
    checked: dict[str, Any] = printable(values)
    return checked


def build(kind: type[Made], values: Any, path: str = "") -> Made:
    """A ``kind``, which is a dataclass, from a JSON object. Raises TypeError that names the first value that does not
    fit (``events[3].reason``), or what is missing or unknown."""
    if not isinstance(values, dict):
        raise TypeError(f"{path} is {_name(values)}, not an object")
    hints = _hints(kind)  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    return kind(**{name: _value(hints.get(name, Any), each, f"{prefix}{name}") for name, each in values.items()})


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
        return build(hint, given, path)
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
        raise TypeError(f"{path} is {_name(given)}, not {hint.__name__}")
    return given


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _name(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _limit(value: Any, levels: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise RecursionError
    for each in value.values() if isinstance(value, dict) else value:
        _limit(each, levels - 1)
