"""Known faults of the compiler are healed: compiled with what helps, checked again, named; else eager, as ever."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from strategies import Regional, remedies
from strategies.remedies import Remedy, functions_behind
from tests.strategies import backends
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile

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


class Squares(nn.Module):
    """One tensor twice into a function (pytorch 183604)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.linear(x_BD)
        return x_BD + Product.apply(x_BD, x_BD)


class InPlace(Squares):
    """A function that writes in place (pytorch 180642)."""

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.linear(x_BD)
        return Doubled.apply(x_BD.sin(), x_BD)


class Module(L.LightningModule):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(block: type[nn.Module], strategies: list[Any]) -> tuple[Module, Compile]:
    torch.compiler.reset()
    module, compiling = Module(block), Compile(strategies, verbose=False, save=False)
    draws = torch.Generator().manual_seed(1)
    batches: Any = [torch.randn(4, 8, generator=draws) for _ in range(8)]
    quiet_trainer(callbacks=[compiling], max_steps=8, max_epochs=-1).fit(module, DataLoader(batches, batch_size=None))
    return module, compiling


@pytest.mark.filterwarnings("ignore:.*it passes")
@pytest.mark.parametrize("block", [Squares, InPlace])
def test_a_function_that_dynamo_gets_wrong_is_left_to_autograd(block: type[nn.Module]) -> None:
    expected, _ = trained(block, [])
    module, compiling = trained(block, [Regional(blocks=["blocks"], parts=[], backend="aot_eager")])
    record = compiling.record
    assert record.eager_parts == {}
    assert record.regions_compiled == record.regions == 2
    assert module.losses == pytest.approx(expected.losses, rel=1e-6)
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
    expected, _ = trained(InPlace, [])
    with pytest.warns(UserWarning, match=r"run eager .*; compiled with torch._dynamo.allow_in_graph"):
        module, compiling = trained(InPlace, [Regional(blocks=["blocks"], parts=[], backend=backends.FAULTY)])
    assert set(compiling.record.eager_parts) == {"blocks.0", "blocks.1"}
    assert module.losses == expected.losses


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
    option = Remedy(
        name="an option",
        fault="",
        issues=(1,),
        first="2.11",
        device="cpu",
        options={"triton.mix_order_reduction": False},
    )
    elsewhere = Remedy(name="elsewhere", fault="", issues=(2,), first="2.11", device="mps", options={"unknown": 1})
    older = Remedy(name="older", fault="", issues=(3,), first="2.0", fixed="2.1", options={"unknown": 1})
    monkeypatch.setattr(remedies, "REMEDIES", (elsewhere, older, option))

    class Plain(Squares):
        def forward(self, x_BD: Tensor) -> Tensor:
            return self.linear(x_BD).relu()

    reference, _ = trained(Plain, [])
    with pytest.warns(UserWarning, match="compiled with an option"):
        module, compiling = trained(Plain, [Regional(blocks=["blocks"], parts=[])])
    assert compiling.record.eager_parts == {}
    assert module.losses == pytest.approx(reference.losses, rel=1e-5)
    assert not any("unknown" in (options or {}) for options in asked)


def test_functions_behind_a_result_are_those_between_it_and_its_inputs() -> None:
    before = torch.randn(3, requires_grad=True)
    inputs = Doubled.apply(before, before)
    result = (Product.apply(inputs, inputs.sin()) + 1).sum()
    assert functions_behind([result], {"x": inputs}) == {Product}
    assert functions_behind(result.detach(), ()) == set()
