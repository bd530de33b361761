"""Networks of language tasks: GPT-2, Llama and BERT.

GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm blocks, tanh-approximated
GELU, learned positions, a head that shares the embedding's weight. Llama: Touvron et al. 2023,
https://arxiv.org/abs/2302.13971; grouped queries: https://arxiv.org/abs/2305.13245; rotary positions:
https://arxiv.org/abs/2104.09864, in the layout of Hugging Face's checkpoints (halves, not pairs). BERT: Devlin et al.
2018, https://arxiv.org/abs/1810.04805: post-norm blocks, exact GELU, token types, a head that shares the embedding's
weight. Attention by ``scaled_dot_product_attention``; padding needs no mask where attention is causal: it lies to the
right of what attends, and is no target.

Shape letters: B batch, S positions, T = B x S positions in a row, C positions of a piece, D width, H query heads,
G key and value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tasks.language.packing import attend_packed
from tasks.lightning_module import Scores, ScoringTail, TextEmbedding, attend, class_scores, draw_weights, mlp
from tasks.special_tokens import PAD

if TYPE_CHECKING:
    from tasks.language.task import BertNetwork, Gpt2Network, LlamaNetwork


NORM_EPSILON, RMS_EPSILON = 1e-12, 1e-5
"""Of every norm of BERT, as in the original, and of Llama."""


def float32_cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, *, ignore_index: int = PAD, reduction: str = "mean"
) -> Tensor:
    """In nats, of ``logits_TV`` in any precision, computed in float32.

    ``log_softmax`` converts within its kernel: torch's own under autocast would copy all logits to float32 first, and
    their gradient back.
    """
    log_probabilities_TV = F.log_softmax(logits_TV, dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities_TV, targets_T, ignore_index=ignore_index, reduction=reduction)


class NextTokenTail(ScoringTail):
    """Final norm, head and loss, in pieces where the logits of all positions take too much memory."""

    cross_entropy = staticmethod(float32_cross_entropy)

    def __init__(self, norm: nn.Module, head: nn.Linear, *, loss_chunks: int = 1) -> None:
        """``loss_chunks``: pieces of the positions whose logits are there at once in training; those of more than one
        are computed again in backward."""
        super().__init__(norm, head, ignored=PAD)
        self.loss_chunks = loss_chunks

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        if targets_BS is None or self.loss_chunks == 1 or not self.training:
            return super().forward(x_BSD, targets_BS)
        x_TD, targets_T = x_BSD.flatten(0, 1), targets_BS.flatten()
        pieces = zip(x_TD.chunk(self.loss_chunks), targets_T.chunk(self.loss_chunks), strict=True)
        # Nothing in a piece draws random numbers.
        sums = [
            checkpoint(self._loss_sum, x_CD, targets_C, use_reentrant=False, preserve_rng_state=False)
            for x_CD, targets_C in pieces
        ]
        return torch.stack(sums).sum() / (targets_T != PAD).sum(), None, None

    def _loss_sum(self, x_CD: Tensor, targets_C: Tensor) -> Tensor:
        return float32_cross_entropy(self.head(self.norm(x_CD)), targets_C, reduction="sum")


class CausalAttention(nn.Module):
    """Multi-head attention of each position to itself and to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return self.output(attend(self.query_key_value(x_BSD), self.heads, causal=True, dropout=dropout))


class Gpt2Block(nn.Module):
    """One pre-norm block: causal attention, then an MLP four widths wide."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width, nn.GELU(approximate="tanh"))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD)))
        mixed_BSD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD + mixed_BSD


class Gpt2(nn.Module):
    """Predict the next token of a text. ``forward`` holds the whole training computation, loss included."""

    def __init__(self, network: Gpt2Network, *, loss_chunks: int = 1) -> None:
        super().__init__()
        width, dropout = network.width, network.dropout
        self.embed = TextEmbedding(network.vocabulary_size, network.max_tokens, width, dropout)
        blocks = [Gpt2Block(width, network.heads, dropout) for _ in range(network.layers)]
        self.blocks = nn.ModuleList(blocks)
        head = nn.Linear(width, network.vocabulary_size, bias=False)
        head.weight = self.embed.token.weight
        self.tail = NextTokenTail(nn.LayerNorm(width), head, loss_chunks=loss_chunks)
        ends = [end for block in blocks for end in (block.attention.output, block.mlp[2])]
        draw_weights(self, width, 768, positions=[self.embed.position], branch_ends=ends)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Score int64 targets [B, S] after int64 tokens [B, S], padding 0; without targets, return logits [B, S, V]."""
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.tail(x_BSD, targets_BS)


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
        return self.output(mixed_BHSK.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """MLP whose hidden features are gated by others. Shazeer 2020, https://arxiv.org/abs/2002.05202."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class LlamaBlock(nn.Module):
    """One pre-norm block: grouped attention, then a gated MLP."""

    def __init__(self, network: LlamaNetwork) -> None:
        super().__init__()
        width = network.width
        self.attention_norm = nn.RMSNorm(width, eps=RMS_EPSILON)
        self.attention = GroupedAttention(width, network.heads, network.key_value_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=RMS_EPSILON)
        self.mlp = SwiGlu(width, network.hidden_width)

    def forward(self, x_BSD: Tensor, cos_1SK: Tensor, sin_1SK: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]; tables of rotary positions [1, S, K / 2]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_1SK, sin_1SK)
        mixed_BSD: Tensor = self.mlp(self.mlp_norm(x_BSD))
        return x_BSD + mixed_BSD


class Llama(nn.Module):
    """Predict the next token of a text. ``forward`` holds the whole training computation, loss included."""

    def __init__(self, network: LlamaNetwork, *, loss_chunks: int = 1) -> None:
        super().__init__()
        width = network.width
        self.embed = nn.Embedding(network.vocabulary_size, width)
        self.rotary = Rotary(width // network.heads, network.max_tokens, network.rotary_base)
        blocks = [LlamaBlock(network) for _ in range(network.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.tail = NextTokenTail(
            nn.RMSNorm(width, eps=RMS_EPSILON),
            nn.Linear(width, network.vocabulary_size, bias=False),
            loss_chunks=loss_chunks,
        )
        ends = [end for block in blocks for end in (block.attention.output, block.mlp.down)]
        draw_weights(self, width, 4096, branch_ends=ends)  # LLaMA-7B's

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Score int64 targets [B, S] after int64 tokens [B, S], padding 0; without targets, return logits [B, S, V]."""
        x_BSD: Tensor = self.embed(tokens_BS)
        cos_1SK, sin_1SK = self.rotary(tokens_BS.shape[1])
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_1SK, sin_1SK)
        return self.tail(x_BSD, targets_BS)


class BertEmbedding(TextEmbedding):
    """Tokens, learned positions and token types, added and normed."""

    def __init__(self, vocabulary_size: int, max_tokens: int, width: int, dropout: float) -> None:
        super().__init__(vocabulary_size, max_tokens, width, dropout)
        self.token_type = nn.Parameter(torch.zeros(2, width))
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Embed token ids [B, S], all of the first token type, as [B, S, D]; positions are 0 to S - 1 or given."""
        position_SD = self.position[: tokens_BS.shape[1]]
        if positions_BS is not None:
            position_SD = F.embedding(positions_BS, self.position)
        x_BSD = self.token(tokens_BS) + (position_SD + self.token_type[0])
        return self.dropout(self.norm(x_BSD))


class BertBlock(nn.Module):
    """Self-attention and an MLP, each with a residual and a norm after it."""

    def __init__(self, network: BertNetwork, longest: int) -> None:
        super().__init__()
        width = network.width
        self.heads, self.longest = network.heads, longest
        self.attention_dropout = network.dropped_attention
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.mlp = mlp(width, nn.GELU())
        self.mlp_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(network.dropout)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None, offsets_N: Tensor | None = None) -> Tensor:
        """Map [B, S, D] to [B, S, D]; positions attend to where the boolean mask is true, or to all; of one row with
        offsets, to those between the same two."""
        query_key_value = self.query_key_value(x_BSD)
        if offsets_N is None:
            dropout = self.attention_dropout if self.training else 0.0
            mixed_BSD = attend(query_key_value, self.heads, mask_B11S=mask_B11S, dropout=dropout)
        else:
            mixed_BSD = attend_packed(query_key_value, self.heads, offsets_N, longest=self.longest)
        x_BSD = self.attention_norm(x_BSD + self.dropout(self.output(mixed_BSD)))
        return self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))


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

    def __init__(self, network: BertNetwork, *, longest: int | None = None) -> None:
        """``longest``: most positions of a sequence that shares its row with others; None: the network's."""
        super().__init__()
        width = network.width
        self.embed = BertEmbedding(network.vocabulary_size, network.max_tokens, width, network.dropout)
        self.blocks = nn.ModuleList(BertBlock(network, longest or network.max_tokens) for _ in range(network.layers))
        self.tail = BertTail(width, self.embed.token.weight)
        draw_weights(self, width, 768, positions=[self.embed.position, self.embed.token_type])

    def forward(
        self,
        tokens_BS: Tensor,
        mask_BS: Tensor | None = None,
        targets_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        offsets_N: Tensor | None = None,
    ) -> Tensor | Scores:
        """Score int64 targets [B, S] of int64 tokens [B, S]; without targets, return logits [B, S, V].

        ``mask_BS``: boolean, true at tokens and false at padding; None: there is no padding. ``positions_BS`` and
        ``offsets_N`` of a row that holds several sequences: see ``PackedBatch``.
        """
        mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :]
        x_BSD: Tensor = self.embed(tokens_BS, positions_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, mask_B11S, offsets_N)
        return self.tail(x_BSD, targets_BS)
