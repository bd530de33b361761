"""How large the captioning network is. Imports no torch: the command line reads it, and so does the network."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.base import require_fields, require_multiple, require_share


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
        require_fields("task.size", self, image_size=1, patch_size=1, vocabulary_size=259, max_tokens=3)
        require_fields("task.size", self, encoder_layers=1, encoder_width=1, encoder_heads=1)
        require_fields("task.size", self, decoder_layers=1, decoder_width=1, decoder_heads=1)
        require_share("task.size.dropout", self.dropout)
        require_multiple("task.size", self, image_size="patch_size", encoder_width="encoder_heads")
        require_multiple("task.size", self, decoder_width="decoder_heads")
