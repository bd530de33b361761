"""Fixtures: a search over a planted network in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from scripts.bisect.module_comparer import bisect_module
from scripts.bisect.search import Report
from strategies import Whole
from tests.bisect.planted import Trained, loader

Searched = Callable[..., Report]


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def searched() -> Searched:
    """Search a network; by default as ``compile=whole`` with one shape of batch."""

    def search(
        net: nn.Module,
        backend: str = "eager",
        rows: tuple[int, ...] = (4,),
        strategies: Any = None,
        **options: Any,
    ) -> Report:
        torch.manual_seed(0)
        given = strategies or [Whole(backend=backend, **options)]
        return bisect_module(Trained(net), loader(*rows), given, whole=["net"])

    return search
