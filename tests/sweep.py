"""Parameters of which an ordinary run of the tests takes some, and ``./check --all`` every one.

A whole list is for a change of what it is about, and before a release; between these, some of it shows as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MARK = pytest.mark.sweep


def some(values: Iterable[Any], *, every: int) -> list[Any]:
    """``values`` as pytest's parameters, all but each ``every``-th marked as part of the sweep."""
    given = [
        one if isinstance(one, type(pytest.param())) else pytest.param(*(one if isinstance(one, tuple) else (one,)))
        for one in values
    ]
    return [
        one if place % every == 0 else pytest.param(*one.values, id=one.id, marks=[*one.marks, MARK])
        for place, one in enumerate(given)
    ]
