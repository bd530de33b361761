"""Planted cases: small modules, each with one thing that a compiler breaks at or compiles again for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

FACTOR = 1.0


class Planted(nn.Module):
    """A linear layer, and in subclasses what is planted behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        return self.linear(x)


class Prints(Planted):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        print(end="")  # planted
        return y * 2


class Branch(Planted):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # planted
            y = y * 2
        return y + 1


class NumPy(Planted):
    """Which Dynamo traces."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + torch.from_numpy(np.sin(y.detach().numpy()))


class ChangingKeys(Planted):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.linear(sum(x.values()))  # planted


class EvalInside(Planted):
    """Flips its training flag from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))  # planted

    def between_steps(self, step: int) -> None:
        self.train(step % 2 == 0)


class Hook(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.linear.register_forward_hook(self.remember)

    def remember(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.means.append(output.mean().item())  # planted


class GlobalVariable(Planted):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * FACTOR  # planted

    def between_steps(self, step: int) -> None:
        global FACTOR
        FACTOR = 1.0 + step


def closure() -> Planted:
    """A forward that closes over a variable which changes."""
    factor = 1.0

    class Closure(Planted):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * factor  # planted closure

        def between_steps(self, step: int) -> None:
            nonlocal factor
            factor = 1.0 + step

    return Closure()


class ClosureAttribute(Planted):
    """The same in a function that is an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        factor = 1.0

        def scaled(y: Tensor) -> Tensor:
            return y * factor  # planted

        def change(step: int) -> None:
            nonlocal factor
            factor = 1.0 + step

        self.scaled, self.between_steps = scaled, change

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


class InPlaceOnView(Planted):
    """Which is functionalized, and no break."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        first = y.view(-1)[:2]
        first.mul_(2)
        return y


class Trained(L.LightningModule):
    """Trains one planted module, and changes it between two steps where it asks for that."""

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.planted = planted

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        change: Callable[[int], None] | None = getattr(self.planted, "between_steps", None)
        if change is not None:
            change(batch_idx)
        return self.planted(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(batches: list[Any]) -> DataLoader[Any]:
    """The batches as they are, in order."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def like(*sizes: int) -> list[Tensor]:
    """A batch for each size."""
    return [torch.randn(size, 4) for size in sizes]
