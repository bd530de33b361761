"""State that ordinary Python code keeps is where plain Lightning leaves it, and so are the losses that depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.promises.states import KINDS, OF_THE_TRAINING, difference


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 63


def cases() -> Iterator[Any]:
    """Name, place and strategy; ``python -m tests.promises.states`` tries all."""
    for number, name in enumerate(KINDS):
        some = number % 4 == 0
        for place, strategies in {
            "training_step": ["regional", *(["whole"] if some else [])],
            "validation_step": ["regional"] if some else [],
            "hook": ["regional"] if some else [],
            "block": [] if name in OF_THE_TRAINING else ["regional", "whole", "network"],
        }.items():
            for strategy in strategies:
                fast = strategy == "regional" and place in ("training_step", "block")
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(name, place, strategy, marks=marks, id=f"{name}-{place}-{strategy}")


@pytest.mark.parametrize(("name", "place", "strategy"), cases())
def test_it_is_advanced_as_often_as_in_eager(name: str, place: str, strategy: str) -> None:
    assert difference(name, place, strategy) is None
