"""Fixtures: a search over a planted network in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from scripts.bisect.bench import Bench, BenchCallback, fit
from scripts.bisect.search import Outcome, Report, Search
from scripts.bisect.search import searched as those_searched
from strategies import Whole
from tests.bisect import planted
from tests.bisect.trained import Trained, loader
from trainer.callback import Compile
from trainer.loops.lightning import throwaway_trainer

Searched = Callable[..., Report]


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def searched_in(bench: Bench) -> Report:
    """A search whose planted backends begin each trial anew, as their process would."""

    def trial(paths: Sequence[str]) -> Outcome:
        planted.planted_seen.clear()
        return bench.trial(paths)

    return Search(bench.everything, trial).run()


def with_module(module: L.LightningModule, loader: Any, strategies: Any, use: Any, **declared: Any) -> None:
    """Use the bench of a module of any kind."""
    kept, _ = those_searched(strategies)
    compile_ = Compile(kept, parity="off", measure_peak=False, save=False, verbose=False, **declared)
    callback = BenchCallback(compile_, use)
    with tempfile.TemporaryDirectory() as folder:
        trainer = throwaway_trainer(folder, module, [callback, compile_], max_steps=1, limit_val_batches=0)
        fit(trainer, module, train_dataloaders=loader)


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
        found: list[Report] = []

        given = strategies or [Whole(backend=backend, **options)]
        use = lambda bench: found.append(searched_in(bench))  # noqa: E731
        with_module(Trained(net), loader(*rows), given, use, whole=["net"])
        return found[0]

    return search
