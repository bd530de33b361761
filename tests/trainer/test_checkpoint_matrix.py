"""A checkpoint saved under any strategy goes on under any other, with the losses of eager gone on under eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import FLOOR
from tests.trainer.runs import MODULE_STRATEGIES, curve, relative_differences, train

ARMS = ["eager", *MODULE_STRATEGIES]
SAVED_AT, ENDS_AT = 3, 6


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> Callable[[str, str], dict[int, float]]:
    """Losses after a checkpoint saved under one strategy, trained on under another."""
    saved: dict[str, Path] = {}
    made: dict[tuple[str, str], dict[int, float]] = {}

    def make(before: str, after: str) -> dict[int, float]:
        if before not in saved:
            saved[before] = tmp_path_factory.mktemp(f"saved-{before}")
            assert train(saved[before], f"trainer.max_steps={SAVED_AT}", strategy=before).status == "finished"
        if (before, after) not in made:
            run_dir = tmp_path_factory.mktemp(f"{before}-{after}")
            changes = (f"trainer.max_steps={ENDS_AT}", f"resume={saved[before]}")
            record = train(run_dir, *changes, strategy=after)
            assert (record.status, record.steps) == ("finished", ENDS_AT)
            assert record.resumed_from == str(saved[before] / "checkpoints" / "last.ckpt")
            made[before, after] = curve(run_dir)
        return made[before, after]

    return make


@pytest.mark.parametrize("after", ARMS)
@pytest.mark.parametrize("before", ARMS)
def test_any_strategy_goes_on_from_any_other(
    before: str, after: str, gone_on: Callable[[str, str], dict[int, float]]
) -> None:
    losses = gone_on(before, after)
    assert list(losses) == list(range(SAVED_AT + 1, ENDS_AT + 1))
    assert max(relative_differences(losses, gone_on("eager", "eager"))) <= FLOOR
