"""``dynamic``: one graph for ragged lengths, for a network with attention to itself and to images."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from strategies import Dynamic, Program, Ragged, Regional, Strategy, Whole
from strategies.base import apply, edge_of
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.conftest import in_force

LENGTHS = [
    # Among them both widths and the number of image tokens, which are no ragged dimensions.
    *(9, 30, 24, 17, 16, 44, 5, 61, 3)
]


def losses(
    module: nn.Module, declared: Declaration, strategies: list[Strategy], *, multiple: int = 8, rows: int = 2
) -> list[float]:
    """Loss of a forward and backward at each length, padded up to ``multiple``."""
    module, draws = copy.deepcopy(module), torch.Generator().manual_seed(0)
    program = Program(
        module=module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts,
        ragged=(Ragged("tokens", 1, 0, 1),),
    )  # fmt: skip
    apply(strategies, program)
    in_force(program)
    result = []
    for length in LENGTHS:
        width = edge_of(length, (), multiple) + 1
        images = torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=draws)
        loss = module.net(images, torch.randint(3, 259, (rows, width), generator=draws))[0]  # type: ignore[operator]
        loss.backward()
        result.append(float(loss.detach()))
    return result


@pytest.mark.parametrize(("kind", "rows", "count"), [(Whole, 2, 1), (Whole, 1, 1), (Regional, 2, 4)])
def test_losses_are_eagers_at_every_length_with_few_graphs(
    kind: Any, rows: int, count: int, module: nn.Module, declared: Declaration, graphs: list[GraphModule]
) -> None:
    eager = losses(module, declared, [], rows=rows)
    seen = losses(module, declared, [Dynamic(multiple=8), kind(backend=backends.COUNTING)], rows=rows)
    assert seen == pytest.approx(eager, rel=1e-5)
    assert len(graphs) == count


def test_what_a_module_strategy_says_about_shapes_by_hand_stands(
    module: nn.Module, declared: Declaration, graphs: list[GraphModule]
) -> None:
    losses(module, declared, [Dynamic(), Whole(backend=backends.COUNTING, dynamic=False)], multiple=32)
    assert len(graphs) == len({edge_of(length, (), 32) for length in LENGTHS})
