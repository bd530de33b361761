"""Quoting: values that Hydra's override grammar reads back as they were."""

from __future__ import annotations

import re


def quoted(value: object) -> str:
    """A value in quotes: backslashes count only before a quote, and are doubled there."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"
