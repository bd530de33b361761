"""No check calls a healthy training different from eager: some of ``python -m tests.promises.architectures 500``."""

from __future__ import annotations

import pytest
import torch
from crucible import Whole
from torch import Tensor

from tests.promises.architectures import drawn, tried
from tests.promises.cases import CASES, DropoutBlock
from tests.promises.training import Module, Net, assert_as_eager, train, vectors
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


class LayerDrop(Net):
    """Leaves layers out at random, as wav2vec 2.0 does: their weights have no gradient then."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.3:
                x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_layers_that_are_left_out_at_random() -> None:
    make = lambda: Module(LayerDrop([DropoutBlock() for _ in range(3)]))  # noqa: E731
    outcome = train(make, [Whole()], data=vectors(8))
    assert outcome.ended is None, outcome.end
    assert outcome.record is not None
    assert not outcome.record.eager_parts
    assert outcome.record.report["parity"]["how"] == ["seeds"]


@pytest.mark.parametrize("name", ["DrawsFromNumpy", "MasksByNumpy", "DrawsFromAGenerator", "DrawsFromPython"])
def test_numbers_that_are_drawn_on_the_host_are_eagers(name: str) -> None:
    case = CASES[name]
    eager, seen = (train(case.make, under, **case.options) for under in (None, [Whole(backend="aot_eager")]))
    assert_as_eager(eager, seen)
    assert seen.record is not None
    assert (seen.record.eager_parts, seen.record.report["parity"]["verdict"]) == ({}, "passed")
