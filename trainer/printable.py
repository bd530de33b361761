"""Printable: what came from a file that others may have written, without what a terminal or browser would act on.

A record can be anyone's: escape sequences in it would set the title, clear the screen or forge lines of a comparison.
"""

from __future__ import annotations

import re
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 and C1, of which escape sequences are made), those that turn the direction of text around
(https://trojansource.codes), line separators, and halves of characters that no output can encode."""
TEXTS = frozenset({"reason", "notes", "eager_parts", "report", "events"})
"""Keys below which a text may have several lines; elsewhere a line break would forge lines of its own."""


def printable(value: Any, *, lines: bool = False) -> Any:
    """``value`` as read from JSON, its strings and keys without control characters.

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
