"""Layers and scores that networks of several tasks share, and how their weights are drawn.

Shape letters: B batch, S positions, N positions of a context, D width, H heads, K head width or classes, T targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target that is no target: padding, or a token that was not masked. torch's default for ``cross_entropy``."""

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Mean loss in nats a target, right predictions and targets, all 0-D; the last two are None in training mode."""


def class_scores(logits_K: Tensor, targets: Tensor, *, training: bool, ignored: int = IGNORED) -> Scores:
    """Scores of logits [..., K] for int64 targets [...]; those that are ``ignored`` are no targets.

    In training mode the last two are None: an argmax over the classes is not paid for on the training path.
    """
    logits_TK, targets_T = logits_K.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits_TK, targets_T, ignore_index=ignored)
    if training:
        return loss, None, None
    return loss, *right_predictions(logits_TK, targets_T, ignored=ignored)


def right_predictions(logits_TK: Tensor, targets_T: Tensor, *, ignored: int) -> tuple[Tensor, Tensor]:
    """Number of targets that have the largest logit, and of targets, 0-D."""
    real_T = targets_T != ignored
    return ((logits_TK.argmax(dim=-1) == targets_T) & real_T).sum(), real_T.sum()


def attend(
    query_key_value: Tensor, heads: int, *, mask_B11S: Tensor | None = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Self-attention [B, S, D] of queries, keys and values that lie side by side, [B, S, 3 D].

    ``mask_B11S``: true where positions attend to; ``dropout``: share of attention weights dropped.
    """
    query_BHSK, key_BHSK, value_BHSK = (
        part_BSD.unflatten(-1, (heads, -1)).transpose(1, 2) for part_BSD in query_key_value.chunk(3, dim=-1)
    )
    mixed_BHSK = F.scaled_dot_product_attention(
        query_BHSK, key_BHSK, value_BHSK, attn_mask=mask_B11S, dropout_p=dropout, is_causal=causal
    )
    return mixed_BHSK.transpose(1, 2).flatten(2)


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


def mlp(width: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))


def draw_weights(
    net: nn.Module, std: float, *, positions: Sequence[Tensor] = (), branch_ends: Sequence[nn.Module] = ()
) -> None:
    """Draw linear and embedding weights from a normal distribution, in the order of the module tree; biases become 0.

    Args:
        net: What is drawn, in place.
        std: Standard deviation.
        positions: Parameters drawn after them, alike.
        branch_ends: Last layers of all branches that add to the residual stream, drawn once more: scaled so that its
            variance does not grow with depth (Radford et al. 2019, section 2.3).
    """
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for position in positions:
        nn.init.normal_(position, std=std)
    for end in branch_ends:
        assert isinstance(end, nn.Linear)
        nn.init.normal_(end.weight, std=std / math.sqrt(len(branch_ends)))
