"""Layers that networks of several tasks share, and how their weights are drawn.

Shape letters: B batch, S positions, N positions of a context, D width, H heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention of a text sequence over a context, which may be itself."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        """``causal``: a position attends to itself and to earlier ones only."""
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor, context_BND: Tensor) -> Tensor:
        """Attend from ``x_BSD`` to ``context_BND``; returns [B, S, D]."""
        query_BHSK = self.query(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key_BND, value_BND = self.key_value(context_BND).chunk(2, dim=-1)
        mixed_BHSK = F.scaled_dot_product_attention(
            query_BHSK,
            key_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2),
            value_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        y_BSD: Tensor = self.output(mixed_BHSK.transpose(1, 2).flatten(2))
        return y_BSD


class TextEmbedding(nn.Module):
    """Token embedding plus learned positions."""

    def __init__(self, vocabulary_size: int, max_tokens: int, width: int, dropout: float) -> None:
        """``max_tokens``: the longest sequence in positions."""
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.zeros(max_tokens, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed token ids [B, S] as [B, S, D]."""
        x_BSD: Tensor = self.dropout(self.token(tokens_BS) + self.position[: tokens_BS.shape[1]])
        return x_BSD


def draw_weights(net: nn.Module, std: float) -> None:
    """Draw the weights of linear and embedding layers from a normal distribution, in the order of the module tree;
    biases of linear layers become 0."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
