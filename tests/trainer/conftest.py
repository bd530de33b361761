"""Fixtures of the trainer's tests: a private cache, a clean compiler, eager's own losses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.strategies import backends
from tests.trainer.clock import CLOCK, Clock, stop_time
from tests.trainer.runs import curve, last_checkpoint, train

FLOOR = 1e-5
"""Least relative tolerance on losses: eager repeats itself to the last bit on one CPU, a compiler rounds elsewhere."""


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenizers out of the user's cache; train one for all runs."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """No compiled code from other tests, and none left to them."""
    backends.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``CLOCK``, by which alone steps, pauses and waits are timed."""
    stop_time(monkeypatch)
    return CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One task trained eager."""

    losses: dict[int, float]
    state_dict_keys: list[str]


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> Callable[..., Baseline]:
    """Train a task eager, once a session for each task, or for each task in the ``order`` that a strategy gives it."""

    @functools.cache
    def make(task: str, order: str = "eager") -> Baseline:
        folder = tmp_path_factory.mktemp(f"{order}-{task}")
        train(folder, task=task, strategy=order)
        return Baseline(losses=curve(folder), state_dict_keys=list(last_checkpoint(folder)["state_dict"]))

    return make
