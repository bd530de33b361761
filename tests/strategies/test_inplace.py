"""Compiling in place: the module stays what it was, whatever its class, and can go back to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from strategies import STRATEGIES, Checkpointing, Program, Regional, Stage, Strategy, Whole
from strategies.base import apply, compiler_settings
from strategies.regions import RECOMPILE_LIMIT, uncompile
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.conftest import Batch, in_force, loss_and_gradients
from tests.strategies.modules import Block, Holder, Stack

MODULE_STRATEGIES = sorted(
    name
    for name, strategy in STRATEGIES.items()
    if strategy.stage is Stage.MODULE and name not in ("auto", "second_order") and not strategy.removed
)
"""The first calls of ``second_order`` run eager, see its own tests."""


GRAPHS = {"regional": 4, "whole": 1, "modular": 2}
"""Of six blocks of two kinds and two parts; of forward and loss; of an encoder and three blocks."""


def applied(name: str, module: nn.Module, declared: Declaration) -> Program:
    options: dict[str, Any] = {"backend": backends.COUNTING}
    if name == "modular":  # its options are those of each part
        how = {"encoder": "whole", "decoder": "regional", "tail": "off"}
        options = {"parts": {part: {"how": value, **options} for part, value in how.items()}}
    strategy: Strategy = STRATEGIES[name](**options)
    program = Program(module=module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts)
    apply([strategy], program)
    return program


@pytest.mark.parametrize("name", MODULE_STRATEGIES)
def test_a_compiled_module_has_eagers_numbers_stays_what_it_was_and_goes_back_to_eager(
    name: str, module: nn.Module, declared: Declaration, batch: Batch, graphs: list[GraphModule]
) -> None:
    submodules = {path: (type(child), id(child)) for path, child in module.named_modules()}
    parameters = {path: id(parameter) for path, parameter in module.named_parameters()}
    keys = list(module.state_dict())
    loss, gradients = loss_and_gradients(module, batch)
    program = in_force(applied(name, module, declared))
    uncompile(program)
    assert program.regions == []
    assert torch.equal(loss_and_gradients(module, batch)[0], loss)
    assert graphs == []
    program = in_force(applied(name, module, declared))
    for _ in range(2):
        compiled_loss, compiled_gradients = loss_and_gradients(module, batch)
        assert len(graphs) == GRAPHS[name], "a second batch of the same shape compiles nothing"
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients)
    assert {path: (type(child), id(child)) for path, child in module.named_modules()} == submodules
    assert {path: id(parameter) for path, parameter in module.named_parameters()} == parameters
    assert list(module.state_dict()) == keys
    if name == "regional":
        module.eval()
        with torch.no_grad():
            module.get_submodule("net")(*batch)
        assert len(graphs) == 2 * GRAPHS[name], "training and validation are two compiles of a kind"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_stays_eager_with_a_note(graphs: list[GraphModule]) -> None:
    traced = [torch.jit.trace(Block(), torch.randn(2, 8)) for _ in range(2)]
    module = Stack(nn.ModuleList([*traced, Block(), Block()]))
    program = Program(module=module)
    Regional(backend=backends.COUNTING, blocks=["layers"]).apply(program)
    in_force(program)
    module(torch.randn(3, 8)).sum().backward()
    assert [region.path for region in program.regions] == ["layers.2", "layers.3"]
    assert len(graphs) == 1
    assert any(note.startswith("layers.0, layers.1: TorchScript stays as it is") for note in program.notes)
    with pytest.raises(ValueError, match=r"layers\.0: .* is TorchScript"):
        Checkpointing(blocks=["layers.0"]).apply(Program(module=module))


TORCHS_OWN: dict[str, Callable[[], nn.Module]] = {
    "Sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "Linear": lambda: nn.Linear(8, 8),
}


@pytest.mark.parametrize("kind", TORCHS_OWN)
def test_a_module_whose_forward_is_torchs_own_is_really_compiled(kind: str, graphs: list[GraphModule]) -> None:
    # Module.compile() of torch 2.11 does nothing for these, silently.
    torch.manual_seed(0)
    module = Holder(TORCHS_OWN[kind]())
    example = torch.randn(2, 3, 8)
    eager = module.net(example)
    Whole(backend=backends.COUNTING).apply(program := Program(module=module, whole=("net",)))
    in_force(program)
    torch.testing.assert_close(module.net(example), eager)
    assert len(graphs) == 1


def test_more_widths_than_torchs_own_recompile_limit_are_all_compiled(graphs: list[GraphModule]) -> None:
    """Blocks of one class share the limit."""
    module = nn.ModuleList(Block(width) for width in range(4, 16))
    program = Program(module=module)
    apply([Regional(backend=backends.COUNTING, dynamic=False, blocks=[*map(str, range(12))], parts=[])], program)
    assert program.settings["recompile_limit"] == RECOMPILE_LIMIT
    in_force(program)
    with compiler_settings(program.settings):
        for block, width in zip(module, range(4, 16), strict=True):
            block(torch.randn(2, width))
    assert len(graphs) == 12 > 8
