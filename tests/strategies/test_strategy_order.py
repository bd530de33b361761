"""Combining strategies: order comes from their stages, conflicts name both, compiler settings are put back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from strategies import (
    Buckets,
    CudaGraph,
    Dynamic,
    Modular,
    Part,
    Program,
    Regional,
    Stage,
    Strategy,
    Whole,
)
from strategies.base import apply, compiler_settings, ordered


@dataclass(kw_only=True, slots=True)
class Noting(Strategy):
    """Notes that it was applied."""

    name: ClassVar[str] = "noting"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> None:
        program.notes.append(self.name)


@dataclass(kw_only=True, slots=True)
class Early(Noting):
    name: ClassVar[str] = "zz_early"
    stage: ClassVar[Stage] = Stage.CACHE


@dataclass(kw_only=True, slots=True)
class Shared(Noting):
    name: ClassVar[str] = "shared"
    stage: ClassVar[Stage] = Stage.SHAPES
    exclusive: ClassVar[bool] = False


@dataclass(kw_only=True, slots=True)
class AlsoShared(Shared):
    name: ClassVar[str] = "also_shared"


def test_strategies_are_applied_by_stage_whatever_their_order() -> None:
    program = Program(module=nn.Identity())
    apply([Noting(), Shared(), Early(), AlsoShared()], program)
    assert program.notes == ["zz_early", "also_shared", "shared", "noting"]


def test_two_strategies_of_one_stage_are_refused_by_name_in_any_order() -> None:
    for pair in (*itertools.combinations((Whole(), Regional(), Modular()), 2), (Buckets(), Dynamic())):
        first, second = sorted(strategy.name for strategy in pair)
        for order in itertools.permutations(pair):
            message = rf"'{first}' and '{second}' both act on the {pair[0].stage.name.lower()} stage; choose one"
            with pytest.raises(ValueError, match=message):
                ordered(order)
            with pytest.raises(ValueError, match=message):
                apply(order, Program(module=nn.Identity()))


@pytest.mark.parametrize(
    "graphed",
    [Regional(mode="reduce-overhead"), Modular(parts={"a": Part(), "b": Part(mode="max-autotune")})],
    ids=lambda strategy: strategy.name,
)
def test_cuda_graphs_within_cuda_graphs_are_refused_by_name(graphed: Strategy) -> None:
    for order in itertools.permutations((CudaGraph(), graphed)):
        with pytest.raises(ValueError, match=rf"'cuda_graph' captures whole steps, '{graphed.name}' asks Inductor"):
            ordered(order)
    ordered([CudaGraph(), Regional(mode="max-autotune-no-cudagraphs")])


@pytest.mark.parametrize("fails", [False, True])
def test_compiler_settings_hold_inside_and_are_restored_after(fails: bool) -> None:
    config = torch._dynamo.config
    before = (config.recompile_limit, config.optimize_ddp)
    try:
        with compiler_settings({"recompile_limit": 3, "optimize_ddp": False}):
            assert (config.recompile_limit, config.optimize_ddp) == (3, False)
            if fails:
                raise RuntimeError("in the middle of a run")
    except RuntimeError:
        pass
    assert (config.recompile_limit, config.optimize_ddp) == before


@pytest.mark.parametrize("given", [Regional(), [Regional], ["regional"], "regional", None])
def test_what_is_no_list_of_strategies_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^compile=.* is not a list of strategies, such as \[Regional\(\)\]$"):
        ordered(given)
