"""State that ordinary Python code keeps is where plain Lightning leaves it, and so are the losses that depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.promises.states import BESIDE_REGIONS, KINDS, PLACES, STRATEGIES, difference
from tests.sweep import MARK


def cases() -> Iterator[Any]:
    """Name, place and strategy."""
    for number, name in enumerate(KINDS):
        for place in PLACES if name in BESIDE_REGIONS else ("block",):
            for strategy in STRATEGIES:
                checked = (place, strategy) == ("block", "regional")  # where a check runs the code once more
                marks = [] if checked and number % 2 == 0 else [pytest.mark.slow]
                if not checked and (number + list(STRATEGIES).index(strategy)) % 3:
                    marks.append(MARK)
                yield pytest.param(name, place, strategy, marks=marks, id=f"{name}-{place}-{strategy}")


@pytest.mark.parametrize(("name", "place", "strategy"), list(cases()))
def test_it_is_advanced_as_often_as_in_eager(name: str, place: str, strategy: str) -> None:
    assert difference(name, place, strategy) is None
