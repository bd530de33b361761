"""Initial weights that the transformers here share."""

from __future__ import annotations

from torch import nn


def draw_weights(net: nn.Module, std: float) -> None:
    """Draw the weights of linear and embedding layers from a normal distribution, in the order of the module tree;
    biases of linear layers become 0."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
