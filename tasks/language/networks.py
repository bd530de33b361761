"""Networks of language tasks: dimensions of GPT-2, of the Llama family and of BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tasks.base import require_fields, require_multiple, require_share

if TYPE_CHECKING:
    from torch import nn


@dataclass(kw_only=True, slots=True)
class Dimensions:
    """What the networks defined here have in common."""

    least: ClassVar[tuple[int, int]] = (259, 2)
    """Of vocabulary_size and max_tokens."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Features of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""

    def __post_init__(self) -> None:
        vocabulary_size, max_tokens = self.least
        require_fields("task.network", self, layers=1, width=1, heads=1)
        require_fields("task.network", self, vocabulary_size=vocabulary_size, max_tokens=max_tokens)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    def limits(self) -> tuple[int, int]:
        """Outputs of the head, most positions."""
        return self.vocabulary_size, self.max_tokens

    def learning_rate(self) -> float:
        """2.6e-4 for GPT-2: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return 0.2 / self.width


@dataclass(kw_only=True, slots=True)
class LanguageNetwork(Dimensions):
    """Base of every network that predicts the next token."""

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build the network; its weights are drawn from torch's global generator."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Gpt2Network(LanguageNetwork):
    """Dimensions of GPT-2. MLPs are four widths wide; the head shares the embedding's weight."""

    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 in the original."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_share("task.network.dropout", self.dropout, below_one=True)

    def build(self, *, loss_chunks: int) -> nn.Module:
        from tasks.language.model import Gpt2

        return Gpt2(self, loss_chunks=loss_chunks)


@dataclass(kw_only=True, slots=True)
class LlamaNetwork(LanguageNetwork):
    """Dimensions of the Llama family. The head has a weight of its own."""

    heads: int = 4
    """Query heads."""
    key_value_heads: int = 2
    """Key and value heads, each shared by as many query heads as there are for one; ``heads``: nothing is shared."""
    hidden_width: int = 176
    """Hidden features of an MLP."""
    rotary_base: float = 10000.0
    """Wavelength of the slowest rotary position; 500000 from Llama 3 on."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""

    def __post_init__(self) -> None:
        require_fields("task.network", self, heads=1, key_value_heads=1, hidden_width=1, rotary_base=1, norm_epsilon=0)
        require_multiple("task.network.width", self.width, "2 x task.network.heads", 2 * self.heads)
        require_multiple("task.network.heads", self.heads, "task.network.key_value_heads", self.key_value_heads)
        Dimensions.__post_init__(self)

    def build(self, *, loss_chunks: int) -> nn.Module:
        from tasks.language.model import Llama

        return Llama(self, loss_chunks=loss_chunks)


@dataclass(kw_only=True, slots=True)
class BertNetwork(Dimensions):
    """Dimensions of a BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). MLPs are four widths wide.

    The last output of the head is the mask's token, so that the tokenizer learns at most ``vocabulary_size - 1``.
    """

    least: ClassVar[tuple[int, int]] = (260, 3)

    dropout: float = 0.0
    """Share of activations and attention weights dropped in training."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_share("task.network.dropout", self.dropout, below_one=True)

    @property
    def mask_token(self) -> int:
        return self.vocabulary_size - 1

    def learning_rate(self) -> float:
        """The original's 1e-4 for base; Adam's best rate falls with the width."""
        return 0.0768 / self.width
