"""Losses that hold a gradient of the network: compiled as one graph, with eager's losses, forces and gradients."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import SecondOrder
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile

STEPS = 50
CLOSE = 1e-10
"""Relative, in double precision."""


def mlp(inputs: int) -> nn.Sequential:
    layers = nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()


class Base(L.LightningModule):
    """Keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Potential(nn.Module):
    """Energy and forces of clusters; the inner gradient is taken in its forward, as in NequIP."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = mlp(1)

    def forward(self, positions_BA3: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions_BA3.requires_grad_(True)
            apart_BAA = (positions_BA3[:, :, None] - positions_BA3[:, None] + 1e-3).square().sum(-1, keepdim=True)
            energy_B = self.pair(torch.exp(-apart_BAA)).sum((1, 2, 3))
            (slope,) = torch.autograd.grad(energy_B.sum(), positions_BA3, create_graph=self.training)
        return energy_B, -slope


class Forces(Base):
    """The module's forward takes the gradient; the loss is outside."""

    strategy = SecondOrder(backend="aot_eager")
    region = "potential"

    def __init__(self) -> None:
        super().__init__()
        self.potential = Potential()
        self.forces: list[Tensor] = []

    def batches(self, sizes: tuple[int, ...] = (5,)) -> list[Tensor]:
        draws = torch.Generator().manual_seed(1)
        return [
            torch.randn(4, sizes[number % len(sizes)], 3, dtype=torch.double, generator=draws)
            for number in range(STEPS)
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        energy, forces = self.potential(batch)
        self.forces.append(forces.detach().clone())
        return (energy / 100).square().mean() + (forces - batch.detach().flip(1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("forces", self.potential(batch.clone())[1].detach().square().mean())


class Heat(Base):
    """A PINN: the second derivative, in a method."""

    strategy = SecondOrder(functions=["residual"], backend="aot_eager")
    region = "residual"

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)

    def batches(self) -> list[Tensor]:
        draws = torch.Generator().manual_seed(1)
        return [torch.rand(32, 2, dtype=torch.double, generator=draws) for _ in range(STEPS)]

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

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4).double(), mlp(4)

    def batches(self) -> list[Tensor]:
        draws = torch.Generator().manual_seed(1)
        return [torch.randn(8, 4, dtype=torch.double, generator=draws) for _ in range(STEPS)]

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


def trained(make: type[Any], strategies: list[Any], batches: list[Tensor] | None = None) -> tuple[Any, Compile]:
    torch.compiler.reset()
    module = make()
    compiling = Compile(strategies, verbose=False, save=False)
    given: Any = [one.clone() for one in (batches or module.batches())]
    validates = hasattr(make, "validation_step") and make.validation_step is not L.LightningModule.validation_step
    trainer = quiet_trainer(
        callbacks=[compiling], max_epochs=1, max_steps=-1, inference_mode=False, val_check_interval=min(20, len(given)),
        num_sanity_val_steps=0,
    )  # fmt: skip
    torch.manual_seed(3)
    loader = DataLoader(given, batch_size=None)
    trainer.fit(module, loader, DataLoader(given[:2], batch_size=None) if validates else None)
    return module, compiling


@pytest.mark.parametrize("make", [Forces, Heat, Penalized])
def test_losses_and_weights_are_eagers(make: type[Any]) -> None:
    expected, _ = trained(make, [])
    module, compiling = trained(make, [make.strategy])
    record = compiling.record
    assert record.eager_parts == {}
    assert (record.regions_compiled, record.graph_breaks, record.recompiles) == (1, 0, 0)
    assert record.report["parity"]["verdict"] == "passed"
    assert record.audits.verdict == "clean"
    assert [region.path for region in compiling.program.regions] == [make.region]
    assert module.losses == pytest.approx(expected.losses, rel=CLOSE)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE)
    if make is Forces:
        torch.testing.assert_close(module.forces, expected.forces, rtol=CLOSE, atol=CLOSE)
    assert module.state_dict().keys() == expected.state_dict().keys()
    assert vars(module).get(make.region) is None, "outside of a step the method is the class's"


def test_clusters_of_many_sizes_are_few_graphs() -> None:
    sizes = (4, 5, 6, 7, 8, 9, 5, 11)
    batches = Forces().batches(sizes)
    expected, _ = trained(Forces, [], batches)
    module, compiling = trained(Forces, [SecondOrder(backend="aot_eager")], batches)
    assert module.losses == pytest.approx(expected.losses, rel=CLOSE)
    assert compiling.record.eager_parts == {}
    assert compiling.record.graphs <= 2 * 3  # each with a backward, and for validation


def test_a_wrong_inner_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.strategies import backends

    backends.register()
    monkeypatch.setattr(backends.Fault, "backward", 1.01)
    batches = Heat().batches()[:8]
    expected, _ = trained(Heat, [], batches)
    module, compiling = trained(Heat, [SecondOrder(functions=["residual"], backend=backends.FAULTY)], batches)
    assert "it is not eager's" in compiling.record.eager_parts["residual"]
    assert module.losses == expected.losses


class Strained(Potential):
    """Takes a gradient by a tensor that it makes itself, too, and leaves its argument as it was, as NequIP does."""

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
            slope_BA3, stress_B33 = torch.autograd.grad([energy_B.sum()], given, create_graph=True)
            if not asked:
                positions_BA3.requires_grad_(False)
        return energy_B + stress_B33.square().mean((1, 2)), -slope_BA3


class Stressed(Forces):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.potential = Strained()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert not batch.requires_grad
        return loss


def test_a_gradient_by_a_tensor_that_is_made_within_is_in_the_graph() -> None:
    expected, _ = trained(Stressed, [])
    module, compiling = trained(Stressed, [Stressed.strategy])
    assert compiling.record.eager_parts == {}
    assert compiling.record.regions_compiled == 1
    assert module.losses == pytest.approx(expected.losses, rel=CLOSE)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    ("functions", "says"),
    [(["nett.residual"], "there is no submodule 'nett'"), (["resid"], "no method 'resid'; it has batches, residual")],
)
def test_a_wrong_name_is_refused_with_what_there_is(functions: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trained(Heat, [SecondOrder(functions=functions, backend="aot_eager")])
