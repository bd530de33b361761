"""State that ordinary Python code keeps is where plain Lightning leaves it, and so are the losses that depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.promises.states import KINDS, STRATEGIES, UNSEEN_BY_A_CAPTURE, difference, trainings
from tests.sweep import MARK


def cases() -> Iterator[Any]:
    for name, place, strategy in trainings():
        number, checked = list(KINDS).index(name), (place, strategy) == ("block", "regional")
        # A check runs the code once more; a step that is captured is quick.
        marks = [] if strategy == "step" or (checked and number % 2 == 0) else [pytest.mark.slow]
        if marks and not checked and (number + list(STRATEGIES).index(strategy)) % 3:
            marks.append(MARK)
        yield pytest.param(name, place, strategy, marks=marks, id=f"{name}-{place}-{strategy}")


@pytest.mark.parametrize(("name", "place", "strategy"), list(cases()))
def test_it_is_advanced_as_often_as_in_eager(name: str, place: str, strategy: str) -> None:
    found = difference(name, place, strategy)
    assert (found is not None) == (strategy == "step" and name in UNSEEN_BY_A_CAPTURE), found
