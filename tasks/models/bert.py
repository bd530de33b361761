"""BERT: an encoder of text with learned positions and token types, and a head that predicts masked tokens.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805: post-norm blocks, exact GELU, a head that shares the embedding's
weight. Attention by ``scaled_dot_product_attention``, which a mask keeps from padding.

Shape letters: B batch, S positions, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.models.class_scores import Scores, class_scores
from tasks.models.initialise import draw_weights

NORM_EPSILON = 1e-12
"""Of every norm, as in the original."""


class BertEmbedding(nn.Module):
    """Tokens, learned positions and token types, added and normed."""

    def __init__(self, vocabulary_size: int, max_tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.zeros(max_tokens, width))
        self.token_type = nn.Parameter(torch.zeros(2, width))
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed token ids [B, S], all of the first token type, as [B, S, D]."""
        x_BSD = self.token(tokens_BS) + (self.position[: tokens_BS.shape[1]] + self.token_type[0])
        embedded_BSD: Tensor = self.dropout(self.norm(x_BSD))
        return embedded_BSD


class BertBlock(nn.Module):
    """Self-attention and an MLP, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """Map [B, S, D] to [B, S, D]; positions attend to where the boolean mask is true, or to all."""
        query_BHSK, key_BHSK, value_BHSK = (
            part_BSD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BSD in self.query_key_value(x_BSD).chunk(3, dim=-1)
        )
        mixed_BHSK = F.scaled_dot_product_attention(
            query_BHSK,
            key_BHSK,
            value_BHSK,
            attn_mask=mask_B11S,
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        attended_BSD = self.output(mixed_BHSK.transpose(1, 2).flatten(2))
        x_BSD = self.attention_norm(x_BSD + self.dropout(attended_BSD))
        y_BSD: Tensor = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return y_BSD


class BertTail(nn.Module):
    """Transform, norm, head and loss: one region, so that a compiler may fuse the loss into the head."""

    def __init__(self, width: int, token_weight_VD: Tensor) -> None:
        """``token_weight_VD``: of the embedding, which the head shares."""
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.head = nn.Linear(width, len(token_weight_VD))
        self.head.weight = token_weight_VD

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None) -> Tensor | Scores:
        """Logits [B, S, V] of hidden states [B, S, D]; with int64 targets [B, S], their ``Scores``.

        Logits of all positions, also of those that are no targets: picking those that are would read the data, and a
        graph needs one shape.
        """
        logits_BSV: Tensor = self.head(self.norm(F.gelu(self.transform(x_BSD))))
        return logits_BSV if targets_BS is None else class_scores(logits_BSV, targets_BS, training=self.training)


class Bert(nn.Module):
    """Predict masked tokens from the text around them. ``forward`` holds the whole training computation, loss included.

    Every block takes a contiguous input that requires a gradient, so that all of them share one compiled graph.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary_size: int,
        max_tokens: int,
        dropout: float = 0.0,
    ) -> None:
        """Build the network; initial weights are drawn from torch's global generator."""
        super().__init__()
        self.embed = BertEmbedding(vocabulary_size, max_tokens, width, dropout)
        self.blocks = nn.ModuleList(BertBlock(width, heads, dropout) for _ in range(layers))
        self.tail = BertTail(width, self.embed.token.weight)
        # The original's 0.02 at its width of 768, kept in proportion for other widths, which learn slowly otherwise.
        std = 0.02 * math.sqrt(768 / width)
        draw_weights(self, std)
        nn.init.normal_(self.embed.position, std=std)
        nn.init.normal_(self.embed.token_type, std=std)

    def forward(
        self, tokens_BS: Tensor, mask_BS: Tensor | None = None, targets_BS: Tensor | None = None
    ) -> Tensor | Scores:
        """Score int64 targets [B, S] of int64 tokens [B, S]; without targets, return logits [B, S, V].

        ``mask_BS``: boolean, true at tokens and false at padding; None: there is no padding.
        """
        mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :]
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, mask_B11S)
        scores: Tensor | Scores = self.tail(x_BSD, targets_BS)
        return scores
