"""Captioning: describe an image in words, with a Vision Transformer and a text decoder with cross attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration
from tasks.captioner_size import CaptionerSize
from tasks.data.captions import CaptionData
from tasks.data.shapes import Shapes
from tasks.trained import TrainedTask

if TYPE_CHECKING:
    import lightning


@dataclass(kw_only=True, slots=True)
class Captioning(TrainedTask):
    """Image captioning: next-token prediction over captions, given the image."""

    name: ClassVar[str] = "captioning"
    monitor: ClassVar[str | None] = "val/loss"

    size: CaptionerSize = field(default_factory=CaptionerSize)
    """Dimensions of the network."""
    data: CaptionData = field(default_factory=CaptionData)
    """Captioned images: the embedded shapes (also where only the base is given), COCO's layout or a CSV file."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        if type(self.data) is CaptionData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = Shapes(**asdict(self.data))
        TrainedTask.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
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
        """Build the module; see ``initialise`` for its weights."""
        from tasks.models.captioner import CaptionNet
        from tasks.models.captioner_module import Captioner

        # About 3e-3 for tiny and 2.6e-4 for base: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466).
        recipe = self.recipe(default_learning_rate=0.2 / self.size.decoder_width, max_steps=max_steps)
        return Captioner(partial(CaptionNet, **asdict(self.size)), recipe, initialise=self.initialise)

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

    def inference_flops(self, batch: Any) -> int:
        """The same of forward alone."""
        return self.size.inference_flops(images=batch.tokens.shape[0], positions=batch.tokens.shape[1] - 1)
