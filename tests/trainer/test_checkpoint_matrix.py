"""A checkpoint saved under any strategy, or any combination, goes on under any other with the losses of eager.

Not every pair is trained: each arm continues from the one before, so that each saves once and loads once. What a
backend makes of the graphs is no matter here, so that the quickest serves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweep import some
from tests.trainer.conftest import FLOOR
from tests.trainer.runs import MODULE_STRATEGIES, curve, order_of, relative_differences, train

COMBINATION = "[regional,optimizer,buckets,cached]"
ARMS = ["eager", *MODULE_STRATEGIES, "[regional,buckets]", COMBINATION]
PAIRS = list(zip(ARMS, [*ARMS[1:], ARMS[0]], strict=True))
SAVED_AT, ENDS_AT = 3, 6

TASK = "micro"  # the quickest that every arm applies to

GoneOn = Callable[[str, str], dict[int, float]]


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> GoneOn:
    """Losses after a checkpoint saved under one strategy, trained on under another."""
    saved: dict[str, Path] = {}
    made: dict[tuple[str, str], dict[int, float]] = {}

    def make(before: str, after: str) -> dict[int, float]:
        if before not in saved:
            saved[before] = tmp_path_factory.mktemp("saved")
            record = train(saved[before], f"trainer.max_steps={SAVED_AT}", task=TASK, strategy=before, backend="eager")
            assert record.status == "finished"
        if (before, after) not in made:
            run_dir = tmp_path_factory.mktemp("gone-on")
            changes = (f"trainer.max_steps={ENDS_AT}", f"resume={saved[before]}")
            record = train(run_dir, *changes, task=TASK, strategy=after, backend="eager")
            assert (record.status, record.steps) == ("finished", ENDS_AT)
            assert record.resumed_from == str(saved[before] / "checkpoints" / "last.ckpt")
            made[before, after] = curve(run_dir)
        return made[before, after]

    return make


@pytest.mark.parametrize(
    ("before", "after"), some([pytest.param(*pair, id=" to ".join(pair)) for pair in PAIRS], every=3)
)
def test_any_arm_goes_on_from_any_other(before: str, after: str, gone_on: GoneOn) -> None:
    losses = gone_on(before, after)
    assert list(losses) == list(range(SAVED_AT + 1, ENDS_AT + 1))
    eager = gone_on(order_of(before, TASK), order_of(after, TASK))
    assert max(relative_differences(losses, eager)) <= FLOOR


def test_the_order_of_the_examples_is_what_tells_the_arms_apart(gone_on: GoneOn) -> None:
    assert {arm: order_of(arm) for arm in ("regional", COMBINATION)} == {"regional": "eager", COMBINATION: "buckets"}
    assert max(relative_differences(gone_on("eager", "eager"), gone_on("eager", "buckets"))) > FLOOR
