"""``compile=checkpointing``: blocks run forward twice, with eager's numbers, and leave nothing behind."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import Checkpointing, Program, Regional, Whole
from strategies.base import apply
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.conftest import Batch, in_force, loss_and_gradients
from tests.strategies.modules import Block, Stack
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.recording import Recorded
from trainer.callback import Compile


def program_of(module: nn.Module, declared: Declaration) -> Program:
    return Program(module=module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts)


def recompute(program: Program, **options: Any) -> None:
    Checkpointing(**options).apply(program)
    in_force(program)


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


class Dropping(Block):
    """A block that counts its forwards and drops half of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[None] = []  # what is within another object is counted each time

    @property
    def calls(self) -> int:
        return len(self.forwards)

    def forward(self, x_BD: Tensor) -> Tensor:
        self.forwards.append(None)
        return x_BD + nn.functional.dropout(self.linear(self.norm(x_BD)), 0.5, self.training)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(nn.ModuleList(Dropping() for _ in range(4)))


def gradients(module: nn.Module) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    module(torch.ones(3, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("options", "calls"),
    [({}, [2, 2, 2, 2]), ({"every": 2}, [2, 1, 2, 1]), ({"blocks": ["layers", "again"]}, [2, 2, 2, 2])],
    ids=["each", "every second", "under two paths"],
)
def test_within_a_step_blocks_run_forward_twice_and_draw_the_same_random_numbers(
    options: dict[str, Any], calls: list[int]
) -> None:
    expected, module = gradients(stack()), stack()
    if "blocks" in options:
        module.again = nn.ModuleList(module.layers)
    keys, program = list(module.state_dict()), Program(module=module)
    recompute(program, **options)
    assert all(torch.equal(one, other) for one, other in zip(gradients(module), expected, strict=True))
    assert [block.calls for block in module.layers] == calls
    with torch.no_grad():
        module(torch.ones(3, 8))
    assert [block.calls for block in module.layers] == [count + 1 for count in calls]
    paths = [f"layers.{number}" for number, count in enumerate(calls) if count == 2]
    if "blocks" not in options:
        report = {"blocks": 4, "computed_again": len(paths), "paths": paths}
        assert program.report["checkpointing"] == report
        assert "checkpointing: found repeated blocks in layers" in program.notes
    assert list(module.state_dict()) == keys
    assert [type(block) for block in module.layers] == [Dropping] * 4
    program.activate(False)
    assert not [block for block in module.layers if "forward" in vars(block)]
    gradients(module)
    assert [block.calls for block in module.layers] == [count + 2 for count in calls]
    program.activate(True)
    gradients(module)
    assert [block.calls for block in module.layers] == [2 * count + 2 for count in calls]


def test_weights_that_a_call_borrows_are_those_that_it_computes_again_with() -> None:
    def loss_and_slopes(module: Stack) -> list[Tensor]:
        weights = {name: (2 * one).detach().requires_grad_() for name, one in module.named_parameters()}
        torch.manual_seed(1)
        loss = torch.func.functional_call(module, weights, (torch.ones(3, 8),)).square().sum()
        return [loss, *torch.autograd.grad(loss, list(weights.values()))]

    expected = loss_and_slopes(stack())
    module = stack()
    own = list(module.parameters())
    recompute(Program(module=module))
    assert all(torch.equal(one, other) for one, other in zip(loss_and_slopes(module), expected, strict=True))
    assert [block.calls for block in module.layers] == [2, 2, 2, 2]
    assert all(one is other for one, other in zip(module.parameters(), own, strict=True))


def test_under_a_transform_of_torch_func_a_block_keeps_its_activations() -> None:
    def jacobian(module: nn.Module) -> Tensor:
        found: Tensor = torch.func.jacrev(module.eval())(torch.ones(1, 8))
        return found

    module = stack()
    recompute(Program(module=module))
    torch.testing.assert_close(jacobian(module), jacobian(stack()))


class Counting(Block):
    """Changes buffers and an attribute in its forward, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics, self.batches = nn.BatchNorm1d(8), 0
        self.register_buffer("filled", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.batches += 1
        self.filled += 1
        self.replaced = self.replaced + 1
        return self.statistics(super().forward(x_BD)) * (self.batches + self.filled * self.replaced)


def test_what_a_forward_counts_is_counted_once() -> None:
    torch.manual_seed(0)
    eager = Stack(nn.ModuleList(Counting() for _ in range(2)))
    module = copy.deepcopy(eager)
    recompute(program := Program(module=module))
    x_BD = torch.randn(5, 8)
    for kept in (False, True, False):
        for one in (eager, module):
            one.zero_grad()
            loss = one(x_BD).square().sum()
            if kept:  # two backwards, each of which repeats the forward
                loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close(gradients_of(module), gradients_of(eager))
    program.activate(False)
    assert [layer.batches for layer in module.layers] == [3, 3]
    torch.testing.assert_close(module.state_dict(), eager.state_dict())


class Shows(Block):
    """Keeps a figure of its last forward with its graph, and a table of what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Tensor] = {}
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        if len(self.table) < len(x_BD):
            self.table = torch.arange(float(len(x_BD)))[:, None]
        result = super().forward(x_BD) + self.table
        self.shown = {"size": result.square().mean()}
        return result


def test_what_a_block_keeps_of_a_step_keeps_no_step_before() -> None:
    module = nn.Sequential(Shows(), Shows())
    recompute(Program(module=module), blocks=["0", "1"])
    with torch.inference_mode():  # as a validation that comes first; autograd may read its table
        module(torch.ones(3, 8))
    inputs = []
    for _ in range(3):
        inputs.append(weakref.ref(x_BD := torch.randn(3, 8)))
        module(x_BD).sum().backward()
        del x_BD
    gc.collect()
    assert [one() is None for one in inputs] == [True, True, False]


def test_activations_are_not_kept_for_the_backward() -> None:
    def saved(module: nn.Module) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.ones(64, 8)).sum()
        return sum(held.values())

    module = stack()
    before = saved(module)
    recompute(Program(module=module))
    assert saved(module) < before / 2


@pytest.mark.parametrize("kind", [Regional, Whole])
def test_a_compiler_sees_which_part_is_computed_again(
    kind: Any, module: nn.Module, declared: Declaration, batch: Batch, graphs: list[GraphModule]
) -> None:
    loss, expected = loss_and_gradients(module, batch)
    apply([kind(backend=backends.COUNTING), Checkpointing()], program := program_of(module, declared))
    in_force(program)
    compiled_loss, compiled_gradients = loss_and_gradients(module, batch)
    # As many graphs as without: one for each kind of block and each part, or one.
    assert len(graphs) == (4 if kind is Regional else 1)
    marked = [node for graph in graphs for node in graph.graph.nodes if "checkpoint" in str(node.target)]
    assert len(marked) == (2 if kind is Regional else 6)
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, expected)


def test_a_captured_step_computes_again_too(tmp_path: Path) -> None:
    expected = fit(Blocks(), tmp_path, [], max_steps=12)
    compile_ = Compile([Checkpointing(), Recorded()])
    assert fit(Blocks(), tmp_path, [compile_], max_steps=12) == pytest.approx(expected, rel=1e-5)
    assert compile_.record.report["checkpointing"]["computed_again"] == 3
    assert compile_.record.report["recorded"]["replayed_steps"] > 0


def test_what_cannot_be_used_is_said_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^compile\.checkpointing: no repeated blocks found"):
        Checkpointing().apply(Program(module=nn.Linear(2, 2)))
    with pytest.raises(
        ValueError, match=r"^compile\.checkpointing\.blocks: 'layer' matches no submodule; near: layers"
    ):
        Checkpointing(blocks=["layer"]).apply(Program(module=stack()))
    module = stack()
    module.layers[1].forward = lambda x_BD: x_BD
    with pytest.raises(ValueError, match=r"^compile\.checkpointing: layers\.1: the forward of this Dropping has been"):
        Checkpointing().apply(Program(module=module))
