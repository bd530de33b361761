"""Image encoder: torchvision's Vision Transformer taken apart into an embedding, a list of blocks and a norm.

Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929. The modules are torchvision's own, so its blocks, its
initialisation and its numbers hold; only their arrangement is ours, so that one block is one compiled region.

Shape letters: B batch, C colour channels, H height, W width, P patches, N image tokens (P + 1 class token), E width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer


class PatchEmbedding(nn.Module):
    """Turn uint8 images into image tokens: normalise, cut into patches, project, prepend the class token."""

    def __init__(self, vit: VisionTransformer) -> None:
        """Take the stem out of ``vit``."""
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

    def __init__(
        self, *, image_size: int, patch_size: int, layers: int, width: int, heads: int, dropout: float = 0.0
    ) -> None:
        """Build a ViT whose MLP is four widths wide; sizes in pixels."""
        super().__init__()
        vit = VisionTransformer(
            image_size=image_size,
            patch_size=patch_size,
            num_layers=layers,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=4 * width,
            dropout=dropout,
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
        image_BNE: Tensor = self.norm(x_BNE)
        return image_BNE
