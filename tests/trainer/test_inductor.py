"""Inductor for real, on a network small enough for it: eager's losses, a cold start and then a warm one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from strategies import Regional
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.telemetry.record import RunRecord

Arm = tuple[RunRecord, list[float]]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Arm]]:
    """The same training eager, compiled with empty caches, and compiled again with what they then held."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        made = {}
        for name, strategies in (("eager", []), ("cold", [Regional()]), ("warm", [Regional()])):
            torch._dynamo.reset()
            compile_ = Compile(strategies, warmup_steps=1)
            losses = fit(Blocks(), tmp_path_factory.mktemp(name), [compile_])
            made[name] = compile_.record, losses
        yield made


def test_losses_are_eagers(arms: dict[str, Arm]) -> None:
    _, eager = arms["eager"]
    for name in ("cold", "warm"):
        assert arms[name][1] == pytest.approx(eager, rel=1e-5), name


def test_a_first_start_is_cold_and_a_second_one_warm(arms: dict[str, Arm]) -> None:
    cold, warm = arms["cold"][0], arms["warm"][0]
    assert (cold.cache, cold.cache_hits) == ("cold", 0)
    assert cold.cache_misses
    assert (warm.cache, warm.cache_misses) == ("warm", 0)
    assert warm.cache_hits
    assert warm.compile_seconds < cold.compile_seconds
