"""Captioning: describe an image in words, with a Vision Transformer and a text decoder with cross attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, TrainedTask, require_at_least, require_multiple, require_share
from tasks.captioning.sources import CaptionData, Shapes

if TYPE_CHECKING:
    import lightning


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
        """Raise ValueError for values out of range or at odds with each other."""
        for name in ("image_size", "patch_size", "encoder_layers", "encoder_width", "encoder_heads"):
            require_at_least(f"task.size.{name}", getattr(self, name), 1)
        for name in ("decoder_layers", "decoder_width", "decoder_heads"):
            require_at_least(f"task.size.{name}", getattr(self, name), 1)
        require_at_least("task.size.vocabulary_size", self.vocabulary_size, 259)
        require_at_least("task.size.max_tokens", self.max_tokens, 2)
        require_share("task.size.dropout", self.dropout, below_one=True)
        for value, divisor in (
            ("image_size", "patch_size"),
            ("encoder_width", "encoder_heads"),
            ("decoder_width", "decoder_heads"),
        ):
            require_multiple(f"task.size.{value}", getattr(self, value), f"task.size.{divisor}", getattr(self, divisor))

    def training_flops(self, *, images: int, positions: int) -> int:
        """Floating-point operations of the matrix products of one training step, 2 for each multiply-add.

        Backward costs twice forward (a product for each operand's gradient), but for the first convolution, whose
        input needs none. Causal attention counts in full, and nothing that a kernel computes again counts twice:
        the convention of ``torch.utils.flop_counter`` and of PaLM's appendix B (https://arxiv.org/abs/2204.02311).
        """
        convolution, rest = self._forward_products(positions)
        return 2 * images * (2 * convolution + 3 * rest)

    def inference_flops(self, *, images: int, positions: int) -> int:
        """The same of forward alone."""
        return 2 * images * sum(self._forward_products(positions))

    def _forward_products(self, positions: int) -> tuple[int, int]:
        """Multiply-adds of forward for one image: those of its first convolution, and the others."""
        patches = (self.image_size // self.patch_size) ** 2
        tokens, width, text_width = patches + 1, self.encoder_width, self.decoder_width
        convolution = patches * width * 3 * self.patch_size**2
        encoder_block = 12 * tokens * width**2 + 2 * tokens**2 * width
        bridge = tokens * width * text_width if width != text_width else 0
        # Self attention and MLP take 4 + 8 squares of the width a position; cross attention takes 2 a position
        # (query, output) and 2 an image token (key, value).
        decoder_block = (
            14 * positions * text_width**2
            + 2 * tokens * text_width**2
            + 2 * positions**2 * text_width
            + 2 * positions * tokens * text_width
        )
        head = positions * text_width * self.vocabulary_size
        rest = self.encoder_layers * encoder_block + bridge + self.decoder_layers * decoder_block + head
        return convolution, rest


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
        TrainedTask.__post_init__(self)
        if self.data.pad_to is not None and self.data.pad_to > self.size.max_tokens:
            raise ValueError(
                f"task.data.pad_to={self.data.pad_to} must be at most task.size.max_tokens={self.size.max_tokens}"
            )

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module and list its examples. Raises ValueError, naming the file, for unusable input."""
        from tasks.captioning.data import CaptionDataModule

        return CaptionDataModule(
            self.data,
            image_size=self.size.image_size,
            vocabulary_size=self.size.vocabulary_size,
            max_tokens=self.size.max_tokens,
            seed=seed,
        )

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module; see ``initialise`` for its weights."""
        from tasks.captioning.model import Captioner, CaptionNet

        # About 3e-3 for tiny and 2.6e-4 for base: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466).
        recipe = self.recipe(default_learning_rate=0.2 / self.size.decoder_width, max_steps=max_steps)
        return Captioner(partial(CaptionNet, **asdict(self.size)), recipe, initialise=self.initialise)

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

    def training_flops(self, batch: Any) -> int:
        """Floating-point operations of matrix products in forward and backward, from the batch's shapes."""
        return self.size.training_flops(images=batch.tokens.shape[0], positions=batch.tokens.shape[1] - 1)

    def inference_flops(self, batch: Any) -> int:
        """The same of forward alone."""
        return self.size.inference_flops(images=batch.tokens.shape[0], positions=batch.tokens.shape[1] - 1)
