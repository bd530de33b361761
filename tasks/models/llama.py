"""Llama: a causal transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention, without biases.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; grouped queries: https://arxiv.org/abs/2305.13245; rotary
positions: https://arxiv.org/abs/2104.09864, in the layout of Hugging Face's checkpoints (halves, not pairs).

Shape letters: B batch, S positions, D width, H query heads, G key and value heads, K head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.models.class_scores import Scores
from tasks.models.initialise import draw_weights
from tasks.models.language_tail import NextTokenTail


class Rotary(nn.Module):
    """Tables of rotary positions, made once for all blocks."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, max_tokens: int, base: float) -> None:
        """``base``: wavelength, in 2 pi positions, that the slowest of the rotations stays just below."""
        super().__init__()
        frequencies_K = base ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angles_SK = torch.outer(torch.arange(max_tokens, dtype=torch.float32), frequencies_K)
        # The leading 1 puts positions into dimension 1, where strategies look for a ragged one.
        self.register_buffer("cos", angles_SK.cos()[None], persistent=False)
        self.register_buffer("sin", angles_SK.sin()[None], persistent=False)

    def forward(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, S, K / 2] of the first ``positions``."""
        return self.cos[:, :positions], self.sin[:, :positions]


def rotate(x_BHSK: Tensor, cos_1SK: Tensor, sin_1SK: Tensor) -> Tensor:
    """Turn each pair (one of the first half, one of the second) of every head by its position's angle."""
    # In the precision of x: float32 tables would make all of x float32 under autocast.
    cos_1SK, sin_1SK = cos_1SK.to(x_BHSK.dtype), sin_1SK.to(x_BHSK.dtype)
    first, second = x_BHSK.chunk(2, dim=-1)
    return torch.cat((first * cos_1SK - second * sin_1SK, second * cos_1SK + first * sin_1SK), dim=-1)


class GroupedAttention(nn.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        """As many key and value heads as heads are plain multi-head attention."""
        super().__init__()
        self.head_width = width // heads
        self.grouped = key_value_heads != heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, key_value_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BSD: Tensor, cos_1SK: Tensor, sin_1SK: Tensor) -> Tensor:
        """Mix positions; returns [B, S, D]."""
        query_BHSK, key_BGSK, value_BGSK = (
            projection(x_BSD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BHSK = F.scaled_dot_product_attention(
            rotate(query_BHSK, cos_1SK, sin_1SK),
            rotate(key_BGSK, cos_1SK, sin_1SK),
            value_BGSK,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        y_BSD: Tensor = self.output(mixed_BHSK.transpose(1, 2).flatten(2))
        return y_BSD


class SwiGlu(nn.Module):
    """MLP whose hidden features are gated by others. Shazeer 2020, https://arxiv.org/abs/2002.05202."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        y_BSD: Tensor = self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return y_BSD


class LlamaBlock(nn.Module):
    """One pre-norm block: grouped attention, then a gated MLP."""

    def __init__(self, width: int, heads: int, key_value_heads: int, hidden_width: int, norm_epsilon: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=norm_epsilon)
        self.attention = GroupedAttention(width, heads, key_value_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=norm_epsilon)
        self.mlp = SwiGlu(width, hidden_width)

    def forward(self, x_BSD: Tensor, cos_1SK: Tensor, sin_1SK: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]; tables of rotary positions [1, S, K / 2]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_1SK, sin_1SK)
        mixed_BSD: Tensor = self.mlp(self.mlp_norm(x_BSD))
        return x_BSD + mixed_BSD


class Llama(nn.Module):
    """Predict the next token of a text. ``forward`` holds the whole training computation, loss included."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        key_value_heads: int,
        hidden_width: int,
        vocabulary_size: int,
        max_tokens: int,
        rotary_base: float = 10000.0,
        norm_epsilon: float = 1e-5,
        loss_chunks: int = 1,
    ) -> None:
        """Build the network; initial weights are drawn from torch's global generator."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        self.rotary = Rotary(width // heads, max_tokens, rotary_base)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, key_value_heads, hidden_width, norm_epsilon) for _ in range(layers)
        )
        self.tail = NextTokenTail(
            nn.RMSNorm(width, eps=norm_epsilon),
            nn.Linear(width, vocabulary_size, bias=False),
            loss_chunks=loss_chunks,
        )
        self._initialise(layers, width)

    def _initialise(self, layers: int, width: int) -> None:
        # 0.02 at the 4096 of LLaMA-7B, kept in proportion for other widths, which learn slowly otherwise.
        std = 0.02 * math.sqrt(4096 / width)
        draw_weights(self, std)
        # As in GPT-2: what two branches a block add to the residual stream must not grow with depth.
        for block in self.blocks:
            assert isinstance(block, LlamaBlock)
            for branch_end in (block.attention.output, block.mlp.down):
                nn.init.normal_(branch_end.weight, std=std / math.sqrt(2 * layers))

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Score int64 targets [B, S] after int64 tokens [B, S], padding 0; without targets, return logits [B, S, V].

        Padding needs no mask: it lies to the right of what attends, and is no target.
        """
        x_BSD: Tensor = self.embed(tokens_BS)
        cos_1SK, sin_1SK = self.rotary(tokens_BS.shape[1])
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_1SK, sin_1SK)
        result: Tensor | Scores = self.tail(x_BSD, targets_BS)
        return result
