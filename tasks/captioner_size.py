"""Captioner size: the dimensions of the captioning network and the arithmetic they imply."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.checks import require_at_least, require_multiple, require_share


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
