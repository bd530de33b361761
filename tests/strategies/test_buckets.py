"""``buckets``: its options, and one static graph for each shape that a handful of edges leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strategies import Buckets, Program, Ragged, Regional
from strategies.base import apply
from tests.strategies import backends
from tests.strategies.modules import Block


def test_buckets_that_are_not_required_leave_themselves_out_and_say_so() -> None:
    program = Program(module=nn.Linear(1, 1))
    buckets = Buckets(required=False)
    apply([buckets], program)
    buckets.end(program)
    assert (program.padding, program.dynamic, program.report) == (None, None, {})
    assert program.notes == ["buckets: left out, no tensor of the batch is declared ragged"]
    ragged = Program(module=nn.Linear(1, 1), ragged=(Ragged("0", 1),))
    apply([buckets], ragged)
    assert ragged.padding is not None


def test_edges_by_hand_are_taken_and_others_follow_the_lengths() -> None:
    def chosen(strategy: Buckets) -> tuple[int, ...]:
        program = Program(module=nn.Linear(1, 1), ragged=(Ragged("0", 1),))
        apply([strategy], program)
        return program.padding.choose_edges([3, 9, 30, 31])

    assert chosen(Buckets(edges=[8, 20, 40])) == (8, 20, 40)
    assert chosen(Buckets(count=2)) == (16, 32)
    assert chosen(Buckets(count=2, multiple=8)) == (16, 32)
    assert chosen(Buckets(count=8, multiple=8)) == (8, 16, 32)


@pytest.mark.parametrize(("options", "graphs"), [({}, 3), ({"dynamic": True}, 1)], ids=["left open", "by hand"])
def test_each_edge_is_a_static_graph_unless_the_module_strategy_says_otherwise(
    options: dict[str, Any], graphs: int
) -> None:
    backends.register()
    backends.graphs.clear()
    torch._dynamo.reset()
    module = nn.ModuleList(Block() for _ in range(3))
    program = Program(module=module, blocks=("",), ragged=(Ragged("0", 1),))
    strategy = Regional(backend=backends.COUNTING, blocks=["0", "1", "2"], parts=[], **options)
    program.checking.mode = "off"
    apply([Buckets(), strategy], program)
    program.activate(True)
    for length in (16, 32, 48, 16, 32, 48):
        x_BSD = torch.randn(2, length, 8, requires_grad=True)
        for block in module:
            x_BSD = block(x_BSD)
    assert len(backends.graphs) == graphs
