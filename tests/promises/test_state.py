"""State that ordinary Python code keeps is where plain Lightning leaves it, and so are the losses that depend on it."""

from __future__ import annotations

import pytest

from tests.promises.states import KINDS, OF_THE_TRAINING, difference


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 63


@pytest.mark.parametrize("name", KINDS)
def test_the_step_advances_it_as_often_as_eager(name: str) -> None:
    assert difference(name, "training_step", "regional") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS][::4])
@pytest.mark.parametrize("place", ["validation_step", "hook"])
def test_validations_and_hooks_advance_it_as_often_as_eager(name: str, place: str) -> None:
    """Some; ``python -m tests.promises.states`` tries all in all places."""
    assert difference(name, place, "regional") is None


@pytest.mark.parametrize("name", [name for name in KINDS if name not in OF_THE_TRAINING])
@pytest.mark.parametrize(
    "strategy", ["regional", *(pytest.param(one, marks=pytest.mark.slow) for one in ("whole", "network"))]
)
def test_a_block_that_is_checked_advances_it_as_often_as_eager(name: str, strategy: str) -> None:
    assert difference(name, "block", strategy) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS][::4])
def test_under_whole(name: str) -> None:
    assert difference(name, "training_step", "whole") is None
