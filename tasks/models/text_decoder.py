"""Text decoder: a causal transformer that reads image tokens through cross attention, and its loss.

Pre-norm blocks as in GPT-2, attention by ``scaled_dot_product_attention``.

Shape letters: B batch, S text positions, N image tokens, D width, E width of the image tokens, H heads, K head width,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.models.class_scores import Scores, class_scores
from tasks.models.initialise import draw_weights

PAD = 0
"""Token id of padding; never a target and never counted."""


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


class DecoderBlock(nn.Module):
    """One pre-norm block: causal self attention, cross attention to the image tokens, MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Build a block whose MLP is four widths wide."""
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, dropout, causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, dropout, causal=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, image_BND: Tensor) -> Tensor:
        """Map text [B, S, D] and image tokens [B, N, D] to text [B, S, D]."""
        y_BSD = self.self_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.self_attention(y_BSD, y_BSD))
        x_BSD = x_BSD + self.dropout(self.cross_attention(self.cross_norm(x_BSD), image_BND))
        mixed_BSD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD + mixed_BSD


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


class TextDecoder(nn.Module):
    """Embedding and blocks; the tail (final norm, head and loss) is a module of its own."""

    def __init__(
        self,
        *,
        vocabulary_size: int,
        max_tokens: int,
        layers: int,
        width: int,
        heads: int,
        image_width: int,
        dropout: float = 0.0,
    ) -> None:
        """Build the decoder; a linear bridge joins ``image_width`` and ``width`` where they differ."""
        super().__init__()
        self.embed = TextEmbedding(vocabulary_size, max_tokens, width, dropout)
        self.bridge = nn.Identity() if image_width == width else nn.Linear(image_width, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(layers))
        self._initialise(layers, width)

    def _initialise(self, layers: int, width: int) -> None:
        # GPT-2's 0.02 at its width of 768, kept in proportion for other widths, which learn slowly otherwise.
        std = 0.02 * math.sqrt(768 / width)
        draw_weights(self, std)
        nn.init.normal_(self.embed.position, std=std)
        # Three branches a block add to the residual stream; scaled so that its variance does not grow with depth
        # (Radford et al. 2019, section 2.3, there for two branches).
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            for branch_end in (block.self_attention.output, block.cross_attention.output, block.mlp[2]):
                assert isinstance(branch_end, nn.Linear)
                nn.init.normal_(branch_end.weight, std=std / math.sqrt(3 * layers))

    def forward(self, tokens_BS: Tensor, image_BNE: Tensor) -> Tensor:
        """Decode token ids [B, S] given image tokens [B, N, E]; returns hidden states [B, S, D]."""
        image_BND = self.bridge(image_BNE)
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, image_BND)
        return x_BSD


class LanguageTail(nn.Module):
    """Final norm, head and loss: one region, so that a compiler may fuse the loss into the head."""

    def __init__(self, width: int, vocabulary_size: int) -> None:
        """The head has no bias and does not share the embedding's weight."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Next-token scores [..., V] of hidden states [..., D]."""
        logits_V: Tensor = self.head(self.norm(x_BSD))
        return logits_V

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Return (mean loss in nats, right predictions, targets), 0-D, over targets that are not padding.

        In training mode the last two are None. Without targets, return logits [B, S, V].
        """
        logits_BSV = self.logits(x_BSD)
        if targets_BS is None:
            return logits_BSV
        return class_scores(logits_BSV, targets_BS, training=self.training, ignored=PAD)
