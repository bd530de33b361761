"""No check calls a healthy training different from eager: some of ``python -m tests.promises.architectures 500``."""

from __future__ import annotations

import pytest

from tests.promises.architectures import drawn, tried
from tests.sweep import some

CLOSE = {False: 1e-3, True: 5e-2}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("seed", some(range(12), every=3))
def test_a_random_architecture(seed: int, bf16: bool) -> None:
    result = tried(drawn(seed, bf16=bf16), own_random_numbers=False)
    assert result.outcome.ended is None, result.outcome.end
    assert result.alarm is None
    assert result.apart <= CLOSE[bf16]
    assert result.verdict in ("passed", "not compared")


@pytest.mark.slow
@pytest.mark.parametrize("seed", some([101, 100, 102], every=3))  # the first one compiles soonest
def test_a_random_architecture_by_inductor(seed: int) -> None:
    result = tried(drawn(seed, backend="inductor"), own_random_numbers=True)
    assert result.outcome.ended is None, result.outcome.end
    assert result.alarm is None
