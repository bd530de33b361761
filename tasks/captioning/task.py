"""Captioning: describe an image in words, with a Vision Transformer and a text decoder with cross attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, TrainedTask, require_fields, require_multiple, require_share
from tasks.captioning.sources import CaptionData, Shapes

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn

    from tasks.module import ScoredModule


@dataclass(kw_only=True, slots=True)
class CaptionerSize:
    """Dimensions of the captioning network. MLPs are four widths wide."""

    image_size: int = 64
    """Width and height of an image, pixels."""
    patch_size: int = 16
    """Width and height of a patch, pixels."""
    encoder_layers: int = 4
    """Blocks of the image encoder."""
    encoder_width: int = 64
    """Width of an image token."""
    encoder_heads: int = 2
    """Attention heads of the image encoder."""
    decoder_layers: int = 4
    """Blocks of the text decoder."""
    decoder_width: int = 64
    """Width of a text position; a linear bridge joins it to another ``encoder_width``."""
    decoder_heads: int = 2
    """Attention heads of the text decoder."""
    vocabulary_size: int = 512
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 160
    """Most text positions; longer captions are left out of the data and counted."""
    dropout: float = 0.0
    """Share of activations dropped in training."""

    def __post_init__(self) -> None:
        require_fields("task.size", self, image_size=1, patch_size=1, vocabulary_size=259, max_tokens=2)
        require_fields("task.size", self, encoder_layers=1, encoder_width=1, encoder_heads=1)
        require_fields("task.size", self, decoder_layers=1, decoder_width=1, decoder_heads=1)
        require_share("task.size.dropout", self.dropout, below_one=True)
        for value, divisor in (
            ("image_size", "patch_size"),
            ("encoder_width", "encoder_heads"),
            ("decoder_width", "decoder_heads"),
        ):
            require_multiple(f"task.size.{value}", getattr(self, value), f"task.size.{divisor}", getattr(self, divisor))


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
        if type(self.data) is CaptionData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = Shapes(**asdict(self.data))
        TrainedTask.__post_init__(self)
        if self.data.pad_to is not None and self.data.pad_to > self.size.max_tokens:
            raise ValueError(
                f"task.data.pad_to={self.data.pad_to} must be at most task.size.max_tokens={self.size.max_tokens}"
            )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.captioning.data import CaptionDataModule

        return CaptionDataModule(self, seed=seed)

    def build_net(self) -> nn.Module:
        from tasks.captioning.model import CaptionNet

        return CaptionNet(self.size)

    def module_class(self) -> type[ScoredModule]:
        from tasks.captioning.model import Captioner

        return Captioner

    def default_learning_rate(self) -> float:
        """About 3e-3 for tiny and 2.6e-4 for base: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return 0.2 / self.size.decoder_width

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with embeddings and the loss apart."""
        from tasks.tokenizer import PAD

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

    def max_positions(self) -> int:
        return self.size.max_tokens

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        images = torch.zeros(rows, 3, self.size.image_size, self.size.image_size, dtype=torch.uint8)
        return images, torch.zeros(rows, positions + 1, dtype=torch.long)
