"""Captioning: describe an image in words, with a Vision Transformer and a text decoder with cross attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, Task
from tasks.captioner_size import CaptionerSize
from tasks.checks import require_at_least, require_share
from tasks.data.captions import CaptionData
from tasks.data.shapes import Shapes

if TYPE_CHECKING:
    import lightning


@dataclass(kw_only=True, slots=True)
class Captioning(Task):
    """Image captioning: next-token prediction over captions, given the image."""

    name: ClassVar[str] = "captioning"
    monitor: ClassVar[str | None] = "val/loss"

    size: CaptionerSize = field(default_factory=CaptionerSize)
    """Dimensions of the network."""
    data: CaptionData = field(default_factory=CaptionData)
    """Captioned images: the embedded shapes (also where only the base is given), COCO's layout or a CSV file."""
    learning_rate: float | None = None
    """Highest learning rate of AdamW, reached after the warm-up. None: 0.2 / ``size.decoder_width``, which is about
    3e-3 for tiny and 2.6e-4 for base; Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
    weight_decay: float = 0.05
    """AdamW's decoupled decay of weights; biases and norms have none."""
    warmup_steps: int = 50
    """Optimizer steps of linear warm-up."""
    final_learning_rate: float = 0.05
    """Learning rate at the last step, as a share of ``learning_rate``."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        if type(self.data) is CaptionData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = Shapes(**asdict(self.data))
        require_at_least("task.weight_decay", self.weight_decay, 0)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_share("task.final_learning_rate", self.final_learning_rate)
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"task.learning_rate={self.learning_rate} must be above 0")
        if self.data.pad_to is not None and self.data.pad_to > self.size.max_tokens:
            raise ValueError(
                f"task.data.pad_to={self.data.pad_to} must be at most task.size.max_tokens={self.size.max_tokens}"
            )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module and list its examples. Raises ValueError, naming the file, for unusable input."""
        from tasks.data.caption_data_module import CaptionDataModule

        return CaptionDataModule(
            self.data,
            image_size=self.size.image_size,
            vocabulary_size=self.size.vocabulary_size,
            max_tokens=self.size.max_tokens,
            seed=seed,
        )

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module; its weights are drawn from torch's global generator."""
        from tasks.models.captioner import CaptionNet
        from tasks.models.captioner_module import Captioner

        return Captioner(
            CaptionNet(**asdict(self.size)),
            learning_rate=0.2 / self.size.decoder_width if self.learning_rate is None else self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            final_share=self.final_learning_rate,
            max_steps=max_steps,
        )

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with embeddings and the loss apart."""
        from tasks.data.tokenizer import PAD

        return Declaration(
            whole=("net",),
            blocks=("net.encoder.blocks", "net.decoder.blocks"),
            # Not decoder.embed: 0.2% of a step for 1.5 s of compiling, measured on an H200 (docs/log.md, 2026-11-21).
            parts=("net.encoder.embed", "net.tail"),
            # The model reads all tokens but the last and predicts all but the first.
            ragged=(("tokens", 1, PAD, 1),),
        )

    def count(self, batch: Any) -> BatchCounts:
        """Count a CaptionBatch: images, text positions, and those that are not padding."""
        images, positions = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        return BatchCounts(samples=images, tokens=images * positions, useful_tokens=batch.useful_tokens)

    def training_flops(self, batch: Any) -> int:
        """Floating-point operations of matrix products in forward and backward, from the batch's shapes."""
        return self.size.training_flops(images=batch.tokens.shape[0], positions=batch.tokens.shape[1] - 1)

    def skipped_items(self, data: lightning.LightningDataModule) -> dict[str, int]:
        """Items left out so far, by reason."""
        from tasks.data.caption_data_module import CaptionDataModule

        return data.skipped if isinstance(data, CaptionDataModule) else {}
