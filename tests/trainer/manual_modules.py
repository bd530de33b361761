"""Modules of somebody else that optimize by hand: two networks against each other, and one that accumulates."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.strategies.modules import Block
from tests.trainer.lightning_modules import Blocks


class Network(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, outputs)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.stem(x_BD)
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.head(x_BD)


class Adversaries(L.LightningModule):
    """A critic and a generator, each with an optimizer; toggles them, clips by hand, returns nothing and logs both.

    Args:
        critic_steps: Training steps for each one in which the generator steps, the last of them.
        optimizer: Class of both optimizers.
        closure: Whether the critic's optimizer is given a closure.
    """

    def __init__(self, *, critic_steps: int = 1, optimizer: Any = torch.optim.Adam, closure: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Network(4, 8), Network(8, 1)
        self._critic_steps, self._optimizer, self._closure = critic_steps, optimizer, closure
        self.seen: list[tuple[str, float, int]] = []
        """Which network, its loss and ``global_step`` before its step."""

    def configure_optimizers(self) -> Any:
        return [self._optimizer(network.parameters(), lr=0.02) for network in (self.generator, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self._train_critic(optimizers[1], batch[0])
        if batch_idx % self._critic_steps == self._critic_steps - 1:
            self._train_generator(optimizers[0], len(batch[0]))

    def _train_critic(self, optimizer: Any, real_BD: Tensor) -> None:
        noise_BD = torch.randn(len(real_BD), 4)

        def closure() -> None:
            optimizer.zero_grad()
            fake_BD = self.generator(noise_BD).detach()
            true, false = self.critic(real_BD), self.critic(fake_BD)
            self._look_back("critic", nn.functional.softplus(-true).mean() + nn.functional.softplus(false).mean())

        with self.toggled_optimizer(optimizer):
            if self._closure:
                optimizer.step(closure=closure)
                return
            closure()
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()

    def _train_generator(self, optimizer: Any, rows: int) -> None:
        with self.toggled_optimizer(optimizer):
            optimizer.zero_grad()
            self._look_back(
                "generator", nn.functional.softplus(-self.critic(self.generator(torch.randn(rows, 4)))).mean()
            )
            optimizer.step()

    def _look_back(self, name: str, loss: Tensor) -> None:
        self.seen.append((name, float(loss.detach()), self.trainer.global_step))
        self.log(name, loss.detach())
        self.manual_backward(loss)


class Accumulates(Blocks):
    """Steps its one optimizer, and a schedule, once for three batches; clips by hand and keeps a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        self.manual_backward(loss / 3)
        if batch_idx % 3 == 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.scaler.scale(loss.detach())
            schedule.step()
        self.rates.append(optimizer.param_groups[0]["lr"])
        return {"loss": loss.detach(), "rows": len(batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]
