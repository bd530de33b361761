"""Checks of configuration values, all with errors of one form: ``task.data.batch_size=0 must be at least 1``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def require_at_least(path: str, value: float | None, minimum: float) -> None:
    """Raise ValueError unless ``value`` is None (automatic) or at least ``minimum``."""
    if value is not None and not value >= minimum:
        raise ValueError(f"{path}={value} must be at least {minimum}")


def require_share(path: str, value: float, *, below_one: bool = False) -> None:
    """Raise ValueError unless ``value`` lies in [0, 1], or in [0, 1) with ``below_one``."""
    if not 0 <= value <= 1 or (below_one and value == 1):
        raise ValueError(f"{path}={value} must be at least 0 and {'below' if below_one else 'at most'} 1")


def require_multiple(path: str, value: int, divisor_path: str, divisor: int) -> None:
    """Raise ValueError unless ``value`` is a multiple of ``divisor``."""
    if value % divisor:
        raise ValueError(f"{path}={value} must be a multiple of {divisor_path}={divisor}")


def near(given: str, known: Iterable[str]) -> str:
    """What an error about ``given`` ends with: the names in ``known`` that resemble it."""
    matches = difflib.get_close_matches(given, list(known), n=3)
    return f"; near: {', '.join(matches)}" if matches else ""
