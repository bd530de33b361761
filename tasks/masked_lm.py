"""Masked language modelling: predict hidden tokens of a text from those around them, with BERT."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration
from tasks.bert_network import BertNetwork
from tasks.data.text import TextData
from tasks.data.text_stdlib import Stdlib
from tasks.trained import TrainedTask

if TYPE_CHECKING:
    import lightning


@dataclass(kw_only=True, slots=True)
class MaskedLM(TrainedTask):
    """BERT's masked tokens, hidden anew in every epoch; see ``tasks/data/masked_batch.py``."""

    name: ClassVar[str] = "masked_lm"
    monitor: ClassVar[str | None] = "val/loss"

    masked_share: float = 0.15
    """Share of a row's tokens to predict, rounded, at least one: of them 80% show the mask, 10% a random token and 10%
    themselves."""
    network: BertNetwork = field(default_factory=BertNetwork)
    """Dimensions of the network."""
    data: TextData = field(default_factory=lambda: TextData(packing="documents"))
    """Text: the embedded standard library (also where only the base is given), text files or JSON lines."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        if type(self.data) is TextData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = Stdlib(**asdict(self.data))
        TrainedTask.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        if not 0 < self.masked_share < 1:
            raise ValueError(f"task.masked_share={self.masked_share} must be above 0 and below 1")
        for name in ("max_tokens", "pad_to"):
            value = getattr(self.data, name)
            if value is not None and value > self.network.max_tokens:
                raise ValueError(
                    f"task.data.{name}={value} must be at most task.network.max_tokens={self.network.max_tokens}"
                )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module. Raises ValueError, naming the file, for unusable input."""
        from tasks.data.masked_data_module import MaskedDataModule

        return MaskedDataModule(
            self.data,
            vocabulary_size=self.network.vocabulary_size,
            max_tokens=self.network.max_tokens,
            masked_share=self.masked_share,
            seed=seed,
        )

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module; see ``initialise`` for its weights."""
        from tasks.models.bert import Bert
        from tasks.models.masked_module import MaskedModule

        # The original's 1e-4 for base; Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466).
        recipe = self.recipe(default_learning_rate=0.0768 / self.network.width, max_steps=max_steps)
        return MaskedModule(partial(Bert, **asdict(self.network)), recipe, initialise=self.initialise)

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with embedding and loss apart. Packed rows are
        no ragged ones."""
        from tasks.data.tokenizer import PAD
        from tasks.models.class_scores import IGNORED

        ragged = (("tokens", 1, PAD, 0), ("targets", 1, IGNORED, 0), ("mask", 1, False, 0))
        return Declaration(
            whole=("net",),
            blocks=("net.blocks",),
            parts=("net.embed", "net.tail"),
            ragged=ragged if self.data.packing == "documents" else (),
        )

    def count(self, batch: Any) -> BatchCounts:
        """Count a MaskedBatch: rows, positions, and those that are not padding."""
        return BatchCounts(
            samples=batch.tokens.shape[0], tokens=batch.tokens.numel(), useful_tokens=batch.useful_tokens
        )

    def training_flops(self, batch: Any) -> int:
        """Operations of matrix products in forward and backward, which has a product for each operand's gradient."""
        return 3 * self.inference_flops(batch)

    def inference_flops(self, batch: Any) -> int:
        """Operations of matrix products in forward, see ``BertNetwork.flops``."""
        rows, positions = batch.tokens.shape
        return self.network.flops(rows=rows, positions=positions)
