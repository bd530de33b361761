"""Values in words: numbers with the units that the names of their facts hold (``_share``, ``_seconds``, ``bytes_``).

This is how what strategies found and did is said, someone else's as well. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ITEMS = 6
"""Most items of a list that are shown."""
CHARACTERS = 120
"""Longest text that is shown whole."""
MIB = 1 << 20


def headlines(report: Mapping[str, Mapping[str, Any]], first: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """One line for each name in ``report`` that has facts: those named in ``first``; all, where it has none of them."""
    lines = {}
    for name, facts in report.items():
        every = dict(flatten(facts))
        chosen = [fact for fact in first.get(name, ()) if fact in every]
        parts = [f"{readable_name(fact)} {with_unit(fact, every[fact])}" for fact in chosen or every]
        if parts:
            lines[name] = " · ".join(parts)
    return lines


def flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Facts by dotted name; those that are None or empty are left out."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            yield f"{prefix}{name}", value


def number(value: float, decimals: int | None = None) -> str:
    """``value`` without an exponent: with three digits, or so many ``decimals`` (below one, two significant digits)."""
    text = f"{value:.3g}"
    if not math.isfinite(value) or (decimals is None and "e" not in text):
        return text
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    smallest = 1 - math.floor(math.log10(abs(value))) if 0 < abs(value) < 1 else 0
    return f"{value:.{max(decimals or 0, smallest)}f}"


def with_unit(fact: str, value: Any) -> str:
    """``value`` with the unit that is in the name of its fact."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        listed = ", ".join(with_unit(fact, item) for item in value[:ITEMS])
        return listed if len(value) <= ITEMS else f"{listed}, ... ({len(value)} in all)"
    if isinstance(value, (int, float)):
        parts = fact.rpartition(".")[2].split("_")
        if "bytes" in parts:
            return f"{value / MIB:.1f} MiB"
        if "milliseconds" in parts:
            return f"{number(value)} ms"
        if "seconds" in parts:
            return f"{number(value, 2)} s" if abs(value) >= 1 else f"{number(value * 1e3)} ms"
        if "share" in parts:
            return f"{value:.1%}"
        return f"{value:,}" if isinstance(value, int) else number(value)
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str), CHARACTERS)


def counted(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 5 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def readable_name(fact: str) -> str:
    """``eager_step_seconds`` as a person would write it; the unit stands beside the value."""
    name = fact.rpartition(".")[2]
    for unit in ("_milliseconds", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")
