"""Module trees that declare nothing, to find blocks in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategies import Program


class Block(nn.Module):
    """A residual block with layers of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.linear(self.norm(x_BD))


class Stack(nn.Module):
    """A stem, a ModuleList of blocks and a head."""

    def __init__(self, layers: nn.ModuleList | nn.Sequential) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = layers
        self.head = nn.Linear(8, 2)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.stem(x_BD)
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.head(x_BD)


class Holder(nn.Module):
    """Holds one submodule under the name ``net``, as a LightningModule would."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def new_program(*strategies: Any, **changes: Any) -> Program:
    """Three blocks and ``strategies``, on the CPU."""
    module = nn.Sequential(*(Block() for _ in range(3)))
    return Program(module=module, strategies=strategies, device=torch.device("cpu"), **changes)
