"""Micro models of sequences: one transformer block, and a small stack of them that labels ragged sequences of tokens.

Blocks are post-norm with GELU, the layout of ``torch.nn.TransformerEncoderLayer``, attention by
``scaled_dot_product_attention``.

Shape letters: B batch, S positions, D width.
"""

from __future__ import annotations

from torch import Tensor, nn

from tasks.data.generated_sequences import VOCABULARY
from tasks.models.class_scores import Scores
from tasks.models.micro_tail import ClassTail
from tasks.models.text_decoder import Attention


class TransformerBlock(nn.Module):
    """Self-attention and an MLP four widths wide, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """``causal``: a position attends to itself and to earlier ones only."""
        super().__init__()
        self.attention = Attention(width, heads, 0.0, causal=causal)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, x_BSD))
        y_BSD: Tensor = self.mlp_norm(x_BSD + self.mlp(x_BSD))
        return y_BSD


class SingleBlock(nn.Module):
    """One transformer block over sequences of one length, with a head of a few classes on every position."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.block = TransformerBlock(width, heads, causal=False)
        self.tail = ClassTail(width, classes)

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Scores of every position of float32 [B, S, D]; with targets the loss, see ``ClassTail``."""
        scores: Tensor | Scores = self.tail(self.block(x_BSD), targets_BS)
        return scores


class RaggedLabeller(nn.Module):
    """Labels every token of sequences of any length. It is causal, so that no real position sees padding."""

    def __init__(self, *, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        self.tail = ClassTail(width, classes)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Scores of every position of int64 tokens [B, S]; with targets the loss, see ``ClassTail``."""
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        scores: Tensor | Scores = self.tail(x_BSD, targets_BS)
        return scores
