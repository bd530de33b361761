"""Fixtures: a clean compiler for each test, and a look at one planted module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from scripts.explain import Explanation
from scripts.explain.run import explain_module
from strategies import Whole
from tests.explain.planted import Trained, like, loader


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def looked() -> Callable[..., Explanation]:
    """Explain a planted module over some batches; by default four of one shape."""

    def look(planted: nn.Module, batches: list[Any] | None = None) -> Explanation:
        given = like(2, 2, 2, 2) if batches is None else batches
        return explain_module(Trained(planted), loader(given), [Whole(backend="eager")], whole=["planted"])

    return look
