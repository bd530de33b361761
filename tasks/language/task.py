"""Language tasks: predict the next token of a text (GPT-2, Llama), or hidden ones from those around them (BERT).

Text is Python's standard library, text files or JSON lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Ragged, TrainedTask, require_choice, require_fields, require_multiple, require_share
from tasks.language.sources import Stdlib, TextData
from tasks.special_tokens import IGNORED, PAD

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn


@dataclass(kw_only=True, slots=True)
class Dimensions:
    """What the networks defined here have in common."""

    reserved: ClassVar[int] = 0
    """Last outputs of the head that the tokenizer does not learn."""
    rate: ClassVar[float] = 0.2
    """Learning rate at a width of 1, 2.6e-4 for GPT-2: Adam's best falls with the width
    (https://arxiv.org/abs/2203.03466)."""

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
        require_fields("task.network", self, layers=1, width=1, heads=1, vocabulary_size=259, max_tokens=3)
        require_multiple("task.network", self, width="heads")


@dataclass(kw_only=True, slots=True)
class LanguageNetwork(Dimensions):
    """Base of the networks that predict the next token."""


@dataclass(kw_only=True, slots=True)
class Gpt2Network(LanguageNetwork):
    """Dimensions of GPT-2. MLPs are four widths wide; the head shares the embedding's weight."""

    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 in the original."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_share("task.network.dropout", self.dropout)


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

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_fields("task.network", self, key_value_heads=1, hidden_width=1, rotary_base=1)
        require_multiple("task.network", self, heads="key_value_heads")
        if self.width // self.heads % 2:
            raise ValueError(
                f"task.network.width={self.width} must be an even multiple of task.network.heads={self.heads}"
            )


@dataclass(kw_only=True, slots=True)
class BertNetwork(Dimensions):
    """Dimensions of a BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). MLPs are four widths wide.

    The last output of the head is the mask's token, so that the tokenizer learns at most ``vocabulary_size - 1``.
    """

    reserved: ClassVar[int] = 1
    rate: ClassVar[float] = 0.0768
    """The original's 1e-4 for base."""

    dropout: float = 0.0
    """Share of activations dropped in training."""
    attention_dropout: float | None = None
    """Share of attention weights dropped in training; null = as of activations."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_fields("task.network", self, vocabulary_size=260)
        require_share("task.network.dropout", self.dropout)
        require_share("task.network.attention_dropout", self.dropped_attention)

    @property
    def dropped_attention(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout


@dataclass(kw_only=True, slots=True)
class TextTask(TrainedTask):
    """Base of the tasks over text."""

    accuracy: ClassVar[str] = "val/token_accuracy"
    embeds: ClassVar[bool] = True
    extra: ClassVar[int] = 1
    """Tokens of a row beyond the positions that the network computes: it reads all but the last, predicts all but the
    first."""
    ragged_fields: ClassVar[Ragged] = (("tokens", 1, PAD, 1),)

    network: Dimensions = field(default_factory=Dimensions)
    """The network."""
    data: TextData = field(default_factory=Stdlib)
    """Text: the embedded standard library, text files or JSON lines."""

    def __post_init__(self) -> None:
        TrainedTask.__post_init__(self)
        for name in ("max_tokens", "pad_to"):
            value, most = getattr(self.data, name), self.max_positions()
            if value is not None and value > most:
                raise ValueError(f"task.data.{name}={value} must be at most task.network.max_tokens={most}")

    def default_learning_rate(self) -> float:
        return self.network.rate / self.network.width

    def max_positions(self) -> int:
        return self.network.max_tokens

    def longest(self) -> int:
        """Most positions of a row or, where a row holds several, of a document."""
        limits = (self.network.max_tokens, self.data.max_tokens, self.data.pad_to)
        return min(limit for limit in limits if limit is not None)

    def count(self, batch: Any) -> BatchCounts:
        rows, positions = batch.tokens.shape[0], batch.tokens.shape[1] - self.extra
        return BatchCounts(samples=rows, tokens=rows * positions, useful_tokens=batch.useful_tokens)

    def ragged(self) -> Ragged:
        """Packed rows are not ragged."""
        return self.ragged_fields if self.data.packing == "documents" else ()

    def example(self, rows: int, positions: int) -> tuple[Tensor | None, ...]:
        """The head is computed at every position, not only where tokens are masked."""
        import torch

        tokens = torch.zeros(rows, positions, dtype=torch.long)
        return tuple(tokens if name in ("inputs", "tokens", "targets") else None for name in self.inputs)


@dataclass(kw_only=True, slots=True)
class LanguageModelling(TextTask):
    """Next-token prediction over text."""

    name: ClassVar[str] = "language_modelling"

    loss_chunks: int = 1
    """Pieces of the positions whose logits are in memory at once in training; those of more than one are computed
    again in backward, which costs another product with the head."""
    network: LanguageNetwork = field(default_factory=Gpt2Network)
    """The network."""

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        require_fields("task", self, loss_chunks=1)
        require_choice("task.data.packing", self.data.packing, ("packed", "documents"))

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.language.data import TextDataModule

        return TextDataModule(self, seed=seed)

    def build_net(self) -> nn.Module:
        from tasks.language.model import Gpt2, Llama

        network: Any = self.network
        return (Llama if isinstance(network, LlamaNetwork) else Gpt2)(network, loss_chunks=self.loss_chunks)


@dataclass(kw_only=True, slots=True)
class MaskedLM(TextTask):
    """Prediction of hidden tokens of a text, as BERT's; others are hidden in every epoch."""

    name: ClassVar[str] = "masked_lm"
    extra: ClassVar[int] = 0
    inputs: ClassVar[tuple[str, ...]] = ("tokens", "mask", "targets", "positions", "offsets")
    parts: ClassVar[tuple[str, ...]] = ("net.embed", "net.tail")
    ragged_fields: ClassVar[Ragged] = (("tokens", 1, PAD, 0), ("targets", 1, IGNORED, 0), ("mask", 1, False, 0))

    network: BertNetwork = field(default_factory=BertNetwork)
    """Dimensions of the network."""
    data: TextData = field(default_factory=lambda: Stdlib(packing="documents"))
    """Text: the embedded standard library, text files or JSON lines."""

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        if self.data.packing == "packed_documents" and self.network.dropped_attention:
            raise ValueError(
                f"task.network.attention_dropout={self.network.dropped_attention} must be 0 with task.data.packing="
                "packed_documents: torch's variable-length attention drops no weights"
            )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.language.data import MaskedDataModule
        from tasks.language.packing import PackedDataModule

        return (PackedDataModule if self.data.packing == "packed_documents" else MaskedDataModule)(self, seed=seed)

    def build_net(self) -> nn.Module:
        from tasks.language.model import Bert

        return Bert(self.network, longest=self.longest())

    def count(self, batch: Any) -> BatchCounts:
        counts = TextTask.count(self, batch)
        return replace(counts, samples=batch.documents or counts.samples, attended=batch.attended)
