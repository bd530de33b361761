"""Known faults of the compiler are healed: compiled with what helps, checked again, named; else eager, as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch.torch_version import TorchVersion

from strategies import Regional, Strategy, remedies
from strategies.remedies import Remedy, functions_behind
from tests.promises.training import Block, Module, Net, Outcome, apart, train, vectors
from tests.strategies import backends

OF_211 = TorchVersion(torch.__version__) < "2.12"
"""Where Dynamo's own way with ``autograd.Function`` gives wrong gradients; later it refuses, or is right."""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        one, other = ctx.saved_tensors
        return gradient * other, gradient * one


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        result = one * other
        result.mul_(2.0)
        ctx.save_for_backward(one, other)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        one, other = ctx.saved_tensors
        return 2 * gradient * other, 2 * gradient * one


class Squares(Block):
    """One tensor twice into a function (pytorch 183604)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + Product.apply(x, x)


class InPlace(Block):
    """A function that writes in place (pytorch 180642)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return Doubled.apply(x.sin(), x)


def trained(block: type[Block], strategies: list[Strategy] | None) -> Outcome:
    return train(lambda: Module(Net([block(), block()])), strategies, data=vectors(8))


@pytest.mark.parametrize("block", [Squares, InPlace])
def test_a_function_that_dynamo_gets_wrong_is_left_to_autograd(block: type[Block]) -> None:
    seen = trained(block, [Regional(backend="aot_eager")])
    record = seen.record
    assert record.eager_parts == {}
    assert record.regions_compiled == record.regions == 2
    assert apart(seen.losses, trained(block, None).losses) <= 1e-6
    healed = [note for note in record.notes if "allow_in_graph" in note]
    assert len(healed) == (1 if OF_211 or block is Squares else 0), record.notes
    for note in healed:
        assert f"{block.__name__}: " in note
        assert "(pytorch issues 183604, 180642, 184113)" in note
        assert "it passes, from step" in note
    assert not any(trace_rules.is_callable_allowed(one) for one in (Product, Doubled)), "undone with the run"


def test_what_a_remedy_does_not_heal_runs_eager_and_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.register()
    monkeypatch.setattr(backends.Fault, "backward", 1.01)
    seen = trained(InPlace, [Regional(backend=backends.FAULTY)])
    assert set(seen.record.eager_parts) == {"net.blocks.0", "net.blocks.1"}
    assert any("run eager" in one and "; compiled with torch._dynamo.allow_in_graph" in one for one in seen.warned)
    assert seen.losses == trained(InPlace, None).losses


def test_options_are_tried_on_the_device_and_the_backend_that_have_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compile_as_torch = torch.compile

    def wrong_without(function: Any, **arguments: Any) -> Any:
        """Compiled code that is wrong but with the option."""
        asked.append(arguments.get("options"))
        healthy = (arguments.get("options") or {}).get("triton.mix_order_reduction") is False
        call = compile_as_torch(function, backend="aot_eager")
        return call if healthy else lambda *args, **kwargs: call(*args, **kwargs) * 1.01

    monkeypatch.setattr(torch, "compile", wrong_without)
    option = {"triton.mix_order_reduction": False}
    given = (
        Remedy(name="elsewhere", fault="", issues=(2,), first="2.11", device="mps", options={"unknown": 1}),
        Remedy(name="older", fault="", issues=(3,), first="2.0", fixed="2.1", options={"unknown": 1}),
        Remedy(name="an option", fault="", issues=(1,), first="2.11", device="cpu", options=option),
    )
    monkeypatch.setattr(remedies, "REMEDIES", given)
    seen = trained(Block, [Regional()])
    assert seen.record.eager_parts == {}
    assert any("compiled with an option" in one for one in seen.warned)
    assert apart(seen.losses, trained(Block, None).losses) <= 1e-5
    assert not any("unknown" in (options or {}) for options in asked)


def test_functions_behind_a_result_are_those_between_it_and_its_inputs() -> None:
    before = torch.randn(3, requires_grad=True)
    inputs = Doubled.apply(before, before)
    result = (Product.apply(inputs, inputs.sin()) + 1).sum()
    assert functions_behind([result], {"x": inputs}) == {Product}
    assert functions_behind(result.detach(), ()) == set()
