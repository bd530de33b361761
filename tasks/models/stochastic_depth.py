"""Stochastic depth whose rate is a tensor, so that blocks of different rates share one compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth


class SharedStochasticDepth(nn.Module):
    """Drop a residual branch of whole examples in training (Huang et al. 2016, https://arxiv.org/abs/1603.09382).

    torchvision's keeps its rate as a Python number, which grows with depth: compiled code would be made anew for each
    block of ConvNeXt, EfficientNet or Swin.
    """

    survival: Tensor

    def __init__(self, rate: float) -> None:
        """``rate``: share of examples whose branch is dropped, below 1."""
        super().__init__()
        # Not in checkpoints, whose names are those of torchvision's own network.
        self.register_buffer("survival", torch.tensor(1.0 - rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Drop examples of ``x`` [B, ...]; the others are scaled up, so that the mean stays."""
        if not self.training:
            return x
        survival = self.survival.to(x.dtype)
        kept = torch.bernoulli(survival.expand(x.shape[0], *[1] * (x.dim() - 1)))
        return x * (kept / survival)


def share_stochastic_depth(model: nn.Module) -> nn.Module:
    """Replace torchvision's modules within ``model`` in place; returns it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, StochasticDepth) and child.mode == "row" and child.p < 1.0:
                setattr(module, name, SharedStochasticDepth(child.p))
    return model
