"""The parity gate in the middle of a training: rounding is large beside the gradients that are left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strategies import Program, Regional
from strategies.base import apply
from tests.faults.planted import Call, floating, regional
from trainer.guards.compare import ParityError, without_autocast
from trainer.guards.parity import ParityGate
from trainer.guards.snapshot import Snapshot
from trainer.loops.plain import PlainLoop


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)

    def forward(self, x_BD: Tensor, targets_B: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x_BD), targets_B)


class Learned(nn.Module):
    """Its loss is about exp(-``margin``), the less the better it has learned."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.tail = Tail()
        with torch.no_grad():
            self.tail.head.weight.copy_(margin * torch.eye(16))
            self.tail.head.bias.zero_()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss: Tensor = self.tail(*batch)
        return loss


def gate(module: Learned, strategy: Regional, precision: str) -> dict[str, object]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    loop = PlainLoop(module, optimizer, precision=precision)
    program = Program(module=module, strategies=(strategy,), device=torch.device("cpu"), precision=precision)
    apply([strategy], program)
    program.optimizers, program.loop = (optimizer,), loop
    generator = torch.Generator().manual_seed(0)
    targets_B = torch.randint(0, 16, (64,), generator=generator)
    batch = (torch.eye(16)[targets_B] + 0.05 * torch.randn(64, 16, generator=generator), targets_B)
    return ParityGate("on", loop, program, Snapshot(loop, batch, program)).run(batch)


@pytest.mark.parametrize("margin", [2.0, 12.0, 16.0])
def test_a_learned_loss_differs_by_its_rounding(margin: float) -> None:
    torch._dynamo.reset()
    strategy = Regional(backend="aot_eager_decomp_partition", blocks=[], parts=["tail"])
    facts = gate(Learned(margin), strategy, "32-true")
    assert facts["verdict"] == ("passed" if margin == 2.0 else facts["verdict"])


def test_code_that_rounds_less_than_autocast_passes() -> None:
    def exactly(call: Call) -> list[object]:
        with without_autocast():
            return call.run()

    torch._dynamo.reset()
    strategy = regional(exactly)
    strategy.blocks, strategy.parts = [], ["tail"]
    assert gate(Learned(12.0), strategy, "bf16-mixed")["verdict"] != "failed"


def test_a_wrong_loss_is_found_in_a_learned_one() -> None:
    torch._dynamo.reset()
    strategy = regional(lambda call: floating(call.run(), lambda one: one * 1.5))
    strategy.blocks, strategy.parts = [], ["tail"]
    with pytest.raises(ParityError, match="gradient"):
        gate(Learned(8.0), strategy, "bf16-mixed")
