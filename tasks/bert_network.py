"""BERT network: the dimensions of a BERT and the arithmetic they imply."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.checks import require_at_least, require_multiple, require_share


@dataclass(kw_only=True, slots=True)
class BertNetwork:
    """Dimensions of a BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). MLPs are four widths wide."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Features of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head. The last one is the mask's token, so that the tokenizer learns at most one less; 259 are the
    bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    dropout: float = 0.0
    """Share of activations and attention weights dropped in training."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        for name in ("layers", "width", "heads"):
            require_at_least(f"task.network.{name}", getattr(self, name), 1)
        require_at_least("task.network.vocabulary_size", self.vocabulary_size, 260)
        require_at_least("task.network.max_tokens", self.max_tokens, 3)
        require_share("task.network.dropout", self.dropout, below_one=True)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    @property
    def mask_token(self) -> int:
        """Id of the token that stands for a masked one."""
        return self.vocabulary_size - 1

    def flops(self, *, rows: int, positions: int) -> int:
        """Floating-point operations of the matrix products of one forward, 2 for each multiply-add.

        The head is computed at every position, not only where tokens are masked; padding counts.
        """
        block = 12 * positions * self.width**2 + 2 * positions**2 * self.width
        head = positions * self.width * (self.width + self.vocabulary_size)
        return 2 * rows * (self.layers * block + head)
