"""Language networks: dimensions of GPT-2 and of the Llama family, and the arithmetic that they imply."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tasks.checks import require_at_least, require_multiple, require_share

if TYPE_CHECKING:
    from torch import nn


@dataclass(kw_only=True, slots=True)
class LanguageNetwork:
    """Base of every network that predicts the next token."""

    def limits(self) -> tuple[int, int]:
        """(outputs of the head, most positions). Raises ValueError for a network that cannot be built."""
        raise NotImplementedError

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build the network; its weights are drawn from torch's global generator."""
        raise NotImplementedError

    def learning_rate(self) -> float:
        """The highest learning rate where none is given."""
        raise NotImplementedError

    def blocks(self) -> tuple[str, ...]:
        """Containers of repeated blocks, as paths within the network."""
        return ("blocks",)

    def parts(self) -> tuple[str, ...]:
        """Other submodules worth a region of their own."""
        return ("tail",)

    def flops(self, *, rows: int, positions: int) -> int | None:
        """Floating-point operations of a forward pass: matrix products, 2 for each multiply-add.

        Causal attention counts in full, as ``torch.utils.flop_counter`` counts it and as PaLM's appendix B does
        (https://arxiv.org/abs/2204.02311): kernels compute about half of that square. None: not known.
        """
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Gpt2Network(LanguageNetwork):
    """Dimensions of GPT-2. MLPs are four widths wide; the head shares the embedding's weight."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Width of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 in the original."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        require_dimensions(self, "layers", "width", "heads")
        require_share("task.network.dropout", self.dropout, below_one=True)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    def limits(self) -> tuple[int, int]:
        """As given."""
        return self.vocabulary_size, self.max_tokens

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build a ``Gpt2``."""
        from tasks.models.gpt2 import Gpt2

        return Gpt2(**asdict(self), loss_chunks=loss_chunks)

    def learning_rate(self) -> float:
        """About 3e-3 for the smallest and 2.6e-4 for GPT-2: Adam's best rate falls with the width."""
        return 0.2 / self.width

    def flops(self, *, rows: int, positions: int) -> int:
        """Query, key, value and output take 4 squares of the width a position, the MLP 8."""
        block = 12 * positions * self.width**2 + 2 * positions**2 * self.width
        head = positions * self.width * self.vocabulary_size
        return 2 * rows * (self.layers * block + head)


@dataclass(kw_only=True, slots=True)
class LlamaNetwork(LanguageNetwork):
    """Dimensions of the Llama family. The head has a weight of its own."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Width of a position."""
    heads: int = 4
    """Query heads."""
    key_value_heads: int = 2
    """Key and value heads, each shared by as many query heads as there are for one; ``heads``: nothing is shared."""
    hidden_width: int = 176
    """Hidden features of an MLP."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    rotary_base: float = 10000.0
    """Wavelength of the slowest rotary position; 500000 from Llama 3 on."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        require_dimensions(self, "layers", "width", "heads", "key_value_heads", "hidden_width", "rotary_base")
        require_at_least("task.network.norm_epsilon", self.norm_epsilon, 0)
        require_multiple("task.network.width", self.width, "2 x task.network.heads", 2 * self.heads)
        require_multiple("task.network.heads", self.heads, "task.network.key_value_heads", self.key_value_heads)

    def limits(self) -> tuple[int, int]:
        """As given."""
        return self.vocabulary_size, self.max_tokens

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build a ``Llama``."""
        from tasks.models.llama import Llama

        return Llama(**asdict(self), loss_chunks=loss_chunks)

    def learning_rate(self) -> float:
        """About 3e-3 for the smallest and 5e-5 for 7B: Adam's best rate falls with the width."""
        return 0.2 / self.width

    def flops(self, *, rows: int, positions: int) -> int:
        """Query and output take 2 squares of the width a position, keys and values less where they are shared."""
        shared = self.width * self.width // self.heads * self.key_value_heads
        projections = 2 * self.width**2 + 2 * shared + 3 * self.width * self.hidden_width
        block = positions * projections + 2 * positions**2 * self.width
        head = positions * self.width * self.vocabulary_size
        return 2 * rows * (self.layers * block + head)


def require_dimensions(network: Gpt2Network | LlamaNetwork, *names: str) -> None:
    """Raise ValueError for a dimension that is too small."""
    for name in names:
        require_at_least(f"task.network.{name}", getattr(network, name), 1)
    require_at_least("task.network.vocabulary_size", network.vocabulary_size, 259)
    require_at_least("task.network.max_tokens", network.max_tokens, 2)
