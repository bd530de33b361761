"""Fixtures: a search over a planted network in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from scripts.bisect.bench import Bench
from scripts.bisect.build import with_module
from scripts.bisect.report import Report
from scripts.bisect.search import Investigation
from scripts.bisect.trial import SYMPTOMS, Outcome, Trial
from strategies import Whole
from tests.bisect import planted
from tests.bisect.trained import Trained, loader

Searched = Callable[..., Report]


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Forgetful:
    """A bench whose planted backends begin each trial anew, as their process would."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.site = bench, bench.site

    def trial(self, trial: Trial) -> Outcome:
        planted.planted_seen.clear()
        return self._bench.trial(trial)


@pytest.fixture
def searched() -> Searched:
    """Search a network for the symptoms; by default as ``compile=whole`` with one shape of batch."""

    def search(
        net: nn.Module,
        backend: str = "eager",
        *symptoms: str,
        rows: tuple[int, ...] = (4,),
        strategies: Any = None,
        then: Callable[[Bench, Report], None] | None = None,
        **options: Any,
    ) -> Report:
        torch.manual_seed(0)
        report = Report(task="planted", strategies="whole", command=[])

        def use(bench: Bench) -> None:
            Investigation(Forgetful(bench), report).run(symptoms or SYMPTOMS[:4])
            if then is not None:
                then(bench, report)

        given = strategies or [Whole(backend=backend, **options)]
        with_module(Trained(net), loader(*rows), given, use, whole=["net"])
        return report

    return search
