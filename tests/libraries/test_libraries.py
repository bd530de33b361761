"""Each library trains under each strategy as with plain Lightning, and nothing ends."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest

from tests.libraries.trainings import ARMS, DERIVING, LIBRARIES, Result, relative_difference, train

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(600)]
STEPS = 6
UNSEEDED = {"scvi"}
"""Whose two trainings with the same seed differ."""


@functools.cache
def plain(library: str, *, rounded: bool = False) -> Result:
    return train(library, None, steps=STEPS, rounded=rounded)


@pytest.mark.parametrize(("library", "arm"), [*itertools.product(LIBRARIES, ARMS), (DERIVING, "second_order")])
def test_a_library_trains_as_with_plain_lightning(library: str, arm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(library, arm, steps=STEPS)
    (record,) = result.records
    assert record.status == "finished", record.reason
    assert len(result.losses) == STEPS
    assert not any("is not eager's" in reason for reason in record.eager_parts.values()), record.eager_parts
    if arm == "second_order":
        assert record.regions_compiled == record.regions == 1
        assert record.eager_parts == {}
    expected, noise = (
        plain(library).losses,
        relative_difference(plain(library).losses, plain(library, rounded=True).losses),
    )
    if library not in UNSEEDED:
        assert result.losses[0] == pytest.approx(expected[0], rel=1e-4)
        assert relative_difference(expected, result.losses) <= max(1e-3, 3 * noise)
