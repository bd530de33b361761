"""GPT-2: a causal transformer with learned positions and a head that shares the embedding's weight.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm blocks, tanh-approximated GELU.

Shape letters: B batch, S positions, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.models.class_scores import Scores
from tasks.models.initialise import draw_weights
from tasks.models.language_tail import NextTokenTail
from tasks.models.text_decoder import TextEmbedding


class CausalAttention(nn.Module):
    """Multi-head attention of each position to itself and to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """``dropout``: share of attention weights dropped in training."""
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Mix positions; returns [B, S, D]."""
        query_BHSK, key_BHSK, value_BHSK = (
            part_BSD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BSD in self.query_key_value(x_BSD).chunk(3, dim=-1)
        )
        mixed_BHSK = F.scaled_dot_product_attention(
            query_BHSK, key_BHSK, value_BHSK, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        y_BSD: Tensor = self.output(mixed_BHSK.transpose(1, 2).flatten(2))
        return y_BSD


class Gpt2Block(nn.Module):
    """One pre-norm block: causal attention, then an MLP four widths wide."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """``dropout``: share of what each branch adds that is dropped in training."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD)))
        mixed_BSD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD + mixed_BSD


class Gpt2(nn.Module):
    """Predict the next token of a text. ``forward`` holds the whole training computation, loss included."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary_size: int,
        max_tokens: int,
        dropout: float = 0.0,
        loss_chunks: int = 1,
    ) -> None:
        """Build the network; initial weights are drawn from torch's global generator."""
        super().__init__()
        self.embed = TextEmbedding(vocabulary_size, max_tokens, width, dropout)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads, dropout) for _ in range(layers))
        head = nn.Linear(width, vocabulary_size, bias=False)
        head.weight = self.embed.token.weight
        self.tail = NextTokenTail(nn.LayerNorm(width), head, loss_chunks=loss_chunks)
        self._initialise(layers, width)

    def _initialise(self, layers: int, width: int) -> None:
        # The original's 0.02 at its width of 768, kept in proportion for other widths, which learn slowly otherwise.
        std = 0.02 * math.sqrt(768 / width)
        draw_weights(self, std)
        nn.init.normal_(self.embed.position, std=std)
        # Two branches a block add to the residual stream; scaled so that its variance does not grow with depth
        # (section 2.3).
        for block in self.blocks:
            assert isinstance(block, Gpt2Block)
            for branch_end in (block.attention.output, block.mlp[2]):
                assert isinstance(branch_end, nn.Linear)
                nn.init.normal_(branch_end.weight, std=std / math.sqrt(2 * layers))

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Score int64 targets [B, S] after int64 tokens [B, S], padding 0; without targets, return logits [B, S, V].

        Padding needs no mask: it lies to the right of what attends, and is no target.
        """
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        result: Tensor | Scores = self.tail(x_BSD, targets_BS)
        return result
