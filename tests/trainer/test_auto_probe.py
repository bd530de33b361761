"""How many steps ``compile=auto`` times: a share of the planned run, bounded on both sides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.auto.trial import device_work, step_seconds

LOOP: Any = SimpleNamespace(device=torch.device("cpu"), broadcast=lambda figure: figure)


@pytest.mark.parametrize(
    ("about", "planned_steps", "timed"),
    [
        (1.0, 20_000, 2),  # a long step: a quarter of a second is over at once
        (0.01, 500, 2),  # half a percent of five seconds
        (0.01, 1_000, 5),
        (0.01, 20_000, 8),  # more would tell no more
        (1.0, 1, 2),
    ],
)
def test_a_short_run_is_timed_by_fewer_steps(about: float, planned_steps: int, timed: int) -> None:
    done: list[int] = []
    seconds = step_seconds(LOOP, lambda: done.append(1), about=about, planned_steps=planned_steps)
    assert len(done) == timed
    assert 0 <= seconds < 1


def test_the_device_s_work_is_timed_on_cuda_alone() -> None:
    assert device_work(LOOP, lambda: None, 1.0) is None
