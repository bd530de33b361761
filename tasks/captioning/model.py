"""The captioning network: an image encoder, a text decoder and a tail with the loss.

Encoder: torchvision's Vision Transformer taken apart into an embedding, a list of blocks and a norm (Dosovitskiy et al.
2020, https://arxiv.org/abs/2010.11929). The modules are torchvision's own, so its blocks, its initialisation and its
numbers hold; only their arrangement is ours, so that one block is one compiled region. Decoder: pre-norm blocks as in
GPT-2, attention by ``scaled_dot_product_attention``.

Shape letters: B batch, C colour channels, H height, W width, P patches, N image tokens (P + 1 class token),
E image width, S text positions, D text width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from tasks.captioning.size import CaptionerSize
from tasks.lightning_module import Attention, Scores, ScoringTail, TextEmbedding, draw_weights, mlp
from tasks.special_tokens import PAD


class CaptionNet(nn.Module):
    """Predict a caption's next token from an image and the caption so far.

    ``forward`` holds the whole training computation, loss included, as one graph without breaks: no branch on data,
    no value read back to the host. Every block takes a contiguous input that requires a gradient, so that all
    blocks of one kind share one compiled graph.
    """

    def __init__(self, size: CaptionerSize) -> None:
        super().__init__()
        self.encoder = ImageEncoder(size)
        self.decoder = TextDecoder(size)
        width = size.decoder_width
        head = nn.Linear(width, size.vocabulary_size, bias=False)  # does not share the embedding's weight
        self.tail = ScoringTail(nn.LayerNorm(width), head, ignored=PAD)
        nn.init.normal_(head.weight, std=0.02)

    def forward(self, images_BCHW: Tensor, tokens_BS: Tensor) -> Scores:
        """Score captions: uint8 images [B, 3, H, W]; int64 tokens [B, S], beginning ... end, then padding.

        Returns (mean loss in nats a target, right predictions, targets), 0-D, over targets that are not padding; the
        last two are None in training mode.
        """
        image_BNE = self.encoder(images_BCHW)
        # Contiguous, so that no compiled region sees strides that depend on the length of the batch's longest caption.
        x_BSD = self.decoder(tokens_BS[:, :-1].contiguous(), image_BNE)
        return self.tail(x_BSD, tokens_BS[:, 1:].contiguous())


class PatchEmbedding(nn.Module):
    """Turn uint8 images into image tokens: normalise, cut into patches, project, prepend the class token."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.conv_proj = vit.conv_proj
        self.class_token = vit.class_token
        self.pos_embedding = vit.encoder.pos_embedding
        self.dropout = vit.encoder.dropout

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Embed uint8 images [B, 3, H, W], values 0..255, as contiguous image tokens [B, N, E]."""
        # Images travel to the device as uint8 (a quarter of the bytes); [0, 255] becomes [-1, 1] here.
        pixels_BCHW = images_BCHW.to(self.class_token.dtype) / 127.5 - 1.0
        patches_BPE = self.conv_proj(pixels_BCHW).flatten(2).transpose(1, 2)
        class_token_B1E = self.class_token.expand(patches_BPE.shape[0], -1, -1).to(patches_BPE.dtype)
        x_BNE = torch.cat((class_token_B1E, patches_BPE), dim=1)
        embedded_BNE: Tensor = self.dropout(x_BNE + self.pos_embedding)
        return embedded_BNE.contiguous()


class ImageEncoder(nn.Module):
    """Encode uint8 images as normalised image tokens, with the numbers of torchvision's ``VisionTransformer``."""

    def __init__(self, size: CaptionerSize) -> None:
        super().__init__()
        vit = VisionTransformer(
            image_size=size.image_size,
            patch_size=size.patch_size,
            num_layers=size.encoder_layers,
            num_heads=size.encoder_heads,
            hidden_dim=size.encoder_width,
            mlp_dim=4 * size.encoder_width,
            dropout=size.dropout,
        )
        self.embed = PatchEmbedding(vit)
        self.blocks = nn.ModuleList(vit.encoder.layers)
        self.norm = vit.encoder.ln

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Encode uint8 images [B, 3, H, W] as image tokens [B, N, E]."""
        x_BNE: Tensor = self.embed(images_BCHW)
        for block in self.blocks:
            # torch's attention returns a transposed view, so a block's sum is not contiguous although its input was.
            # One layout for all blocks keeps them on one compiled graph; in eager the copy replaces the one that the
            # next block's layer norm would make of a strided input.
            x_BNE = block(x_BNE).contiguous()
        return self.norm(x_BNE)


class DecoderBlock(nn.Module):
    """One pre-norm block: causal self attention, cross attention to the image tokens, MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, dropout, causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, dropout, causal=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width, nn.GELU())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, image_BND: Tensor) -> Tensor:
        """Map text [B, S, D] and image tokens [B, N, D] to text [B, S, D]."""
        y_BSD = self.self_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.self_attention(y_BSD, y_BSD))
        x_BSD = x_BSD + self.dropout(self.cross_attention(self.cross_norm(x_BSD), image_BND))
        mixed_BSD: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD + mixed_BSD


class TextDecoder(nn.Module):
    """Embedding and blocks; the tail (final norm, head and loss) is a module of its own."""

    def __init__(self, size: CaptionerSize) -> None:
        """A linear bridge joins the widths of image and text where they differ."""
        super().__init__()
        width, image_width = size.decoder_width, size.encoder_width
        self.embed = TextEmbedding(size.vocabulary_size, size.max_tokens, width, size.dropout)
        self.bridge = nn.Identity() if image_width == width else nn.Linear(image_width, width)
        blocks = [DecoderBlock(width, size.decoder_heads, size.dropout) for _ in range(size.decoder_layers)]
        self.blocks = nn.ModuleList(blocks)
        ends = [
            end for block in blocks for end in (block.self_attention.output, block.cross_attention.output, block.mlp[2])
        ]
        draw_weights(self, width, 768, positions=[self.embed.position], branch_ends=ends)

    def forward(self, tokens_BS: Tensor, image_BNE: Tensor) -> Tensor:
        """Decode token ids [B, S] given image tokens [B, N, E]; returns hidden states [B, S, D]."""
        image_BND = self.bridge(image_BNE)
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, image_BND)
        return x_BSD
