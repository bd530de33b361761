"""``compile=whole``: one graph for forward and loss, and the numbers, names and classes of eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from strategies import Program, Whole
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.conftest import Batch, loss_and_gradients
from tests.strategies.modules import Block, Stack


def test_forward_and_loss_are_one_graph_with_eagers_numbers(
    module: nn.Module, declared: Declaration, batch: Batch, graphs: list[GraphModule]
) -> None:
    loss, gradients = loss_and_gradients(module, batch)
    program = Program(module=module, whole=declared.whole)
    Whole(backend=backends.COUNTING, fullgraph=True).apply(program)
    compiled_loss, compiled_gradients = loss_and_gradients(module, batch)
    assert len(graphs) == 1
    assert any("cross_entropy" in str(node.target) for node in graphs[0].graph.nodes)
    assert [region.path for region in program.regions] == ["net"]
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients)


def test_a_second_batch_of_the_same_shape_compiles_nothing(
    module: nn.Module, declared: Declaration, batch: Batch, graphs: list[GraphModule]
) -> None:
    Whole(backend=backends.COUNTING).apply(Program(module=module, whole=declared.whole))
    for _ in range(3):
        loss_and_gradients(module, batch)
    assert len(graphs) == 1


def test_an_undeclared_module_has_its_children_compiled_and_a_note_says_what_stays_eager(
    graphs: list[GraphModule],
) -> None:
    module = Stack(nn.ModuleList([Block(), Block()]))
    module.add_module("metric", nn.Identity())
    program = Program(module=module)
    Whole(backend=backends.COUNTING).apply(program)
    assert [region.path for region in program.regions] == ["stem", "layers.0", "layers.1", "head"]
    (note,) = program.notes
    assert "stem, layers, head" in note
    assert "stays eager" in note


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile\.whole: .*no child with parameters"):
        Whole().apply(Program(module=nn.Sequential(nn.ReLU(), nn.Identity())))
