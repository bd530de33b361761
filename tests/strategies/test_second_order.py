"""Losses that hold a gradient of the network: compiled as one graph, with eager's losses, forces and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import SecondOrder, Strategy
from tests.promises.training import Module, Outcome, assert_as_eager, train
from tests.strategies import backends

STEPS = 50
CLOSE = 1e-11
"""Relative, in double precision; of weights ten times as much."""


def mlp(inputs: int) -> nn.Sequential:
    layers = nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()


class Potential(nn.Module):
    """Energy and forces of clusters; the inner gradient is taken in its forward, by its argument, which stays as it
    was, and by a tensor that it makes itself, as NequIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = mlp(1)

    def forward(self, positions_BA3: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            strain_B33 = torch.zeros(len(positions_BA3), 3, 3, dtype=positions_BA3.dtype)
            strain_B33.requires_grad_(True)
            asked = positions_BA3.requires_grad
            positions_BA3.requires_grad_(True)
            moved_BA3 = positions_BA3 + positions_BA3 @ (strain_B33 + strain_B33.mT)
            apart_BAA1 = (moved_BA3[:, :, None] - moved_BA3[:, None] + 1e-3).square().sum(-1, keepdim=True)
            energy_B = self.pair(torch.exp(-apart_BAA1)).sum((1, 2, 3))
            given = positions_BA3, strain_B33
            slope_BA3, stress_B33 = torch.autograd.grad([energy_B.sum()], given, create_graph=self.training)
            if not asked:
                positions_BA3.requires_grad_(False)
        return energy_B + stress_B33.square().mean((1, 2)), -slope_BA3


class Base(Module):
    """Says which strategy compiles which region of it, and what its batches are."""

    strategy: Strategy
    region: str
    shape: tuple[int, ...]
    draw = staticmethod(torch.randn)

    def __init__(self) -> None:
        super().__init__(nn.Module())

    @classmethod
    def batches(cls, count: int = STEPS) -> list[Tensor]:
        draws = torch.Generator().manual_seed(1)
        return [cls.draw(cls.shape, dtype=torch.double, generator=draws) for _ in range(count)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Forces(Base):
    """The module's forward takes the gradient; the loss is outside."""

    strategy = SecondOrder(backend="aot_eager")
    region = "potential"
    shape = (4, 5, 3)

    def __init__(self) -> None:
        super().__init__()
        self.potential = Potential()
        self.forces: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        energy, forces = self.potential(batch)
        assert not batch.requires_grad
        self.forces.append(forces.detach().clone())
        return (energy / 100).square().mean() + (forces - batch.flip(1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("forces", self.potential(batch.clone())[1].detach().square().mean())


class Heat(Base):
    """A PINN: the second derivative, in a method."""

    strategy = SecondOrder(functions=["residual"], backend="aot_eager")
    region = "residual"
    shape = (32, 2)
    draw = staticmethod(torch.rand)

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)

    def residual(self, points_N2: Tensor) -> Tensor:
        points_N2.requires_grad_(True)
        (slope_N2,) = torch.autograd.grad(self.net(points_N2).sum(), points_N2, create_graph=True)
        (bend_N2,) = torch.autograd.grad(slope_N2[:, 1].sum(), points_N2, create_graph=True)
        return (slope_N2[:, 0] - 0.1 * bend_N2[:, 1]).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        at_start = batch * torch.tensor([0.0, 1.0], dtype=torch.double)
        return self.residual(batch) + (self.net(at_start) - torch.sin(torch.pi * at_start[:, 1:])).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            self.log("residual", self.residual(batch.clone()).detach())


class Penalized(Base):
    """WGAN-GP by hand: the critic's whole loss with its penalty is one method."""

    strategy = SecondOrder(functions=["critic_loss"], backend="aot_eager")
    region = "critic_loss"
    shape = (8, 4)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4).double(), mlp(4)

    def critic_loss(self, real: Tensor, fake: Tensor, mixed: Tensor) -> Tensor:
        mixed.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        optimizers: Any = self.optimizers()
        of_generator, of_critic = optimizers
        fake, share = self.generator(batch.flip(1)), torch.rand(len(batch), 1, dtype=torch.double)
        mixed = share * batch + (1 - share) * fake.detach()
        loss = self.critic_loss(batch, fake.detach(), mixed)
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        of_generator.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (self.generator, self.critic)]


def trained(make: type[Any], strategies: list[Strategy] | None, steps: int = STEPS) -> Outcome:
    batches = make.batches(steps)
    options = {"data": batches, "inference_mode": False, "val_check_interval": min(20, steps)}
    return train(make, strategies, validation=None if make is Penalized else make.batches(2), **options)


@pytest.mark.parametrize("make", [Forces, Heat, Penalized])
def test_losses_and_weights_are_eagers(make: type[Any]) -> None:
    expected, seen = trained(make, None), trained(make, [make.strategy])
    assert_as_eager(expected, seen, CLOSE)
    record, module = seen.record, seen.module
    assert record.eager_parts == {}
    assert (record.regions_compiled, record.graph_breaks) == (1, 0)
    assert [event.phase for event in record.events] == ["validating"] * (make is Forces), "without gradients outside"
    assert record.report["parity"]["verdict"] == "passed"
    assert record.audits.verdict == "clean"
    assert [region.path for region in seen.trainer.callbacks[-1].program.regions] == [make.region]
    if make is Forces:
        torch.testing.assert_close(module.forces, expected.module.forces, rtol=CLOSE, atol=CLOSE)
    assert vars(module).get(make.region) is None, "outside of a step the method is the class's"


def test_a_wrong_inner_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.register()
    monkeypatch.setattr(backends.Fault, "backward", 1.01)
    expected = trained(Heat, None, 8)
    seen = trained(Heat, [SecondOrder(functions=["residual"], backend=backends.FAULTY)], 8)
    assert "it is not eager's" in seen.record.eager_parts["residual"]
    assert seen.losses == expected.losses


@pytest.mark.parametrize(
    ("functions", "says"),
    [(["nett.residual"], "there is no submodule 'nett'"), (["resid"], "no method 'resid'; it has draw, residual")],
)
def test_a_wrong_name_is_refused_with_what_there_is(functions: list[str], says: str) -> None:
    ended = trained(Heat, [SecondOrder(functions=functions, backend="aot_eager")], 2).ended
    assert says in str(ended)
    assert isinstance(ended, ValueError)
