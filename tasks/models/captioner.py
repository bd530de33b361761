"""Caption network: an image encoder, a text decoder and a language tail with the loss inside forward.

Shape letters: B batch, C colour channels, H height, W width, N image tokens, E image width, S tokens, D text width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tasks.models.image_encoder import ImageEncoder
from tasks.models.text_decoder import LanguageTail, TextDecoder


class CaptionNet(nn.Module):
    """Predict a caption's next token from an image and the caption so far.

    ``forward`` holds the whole training computation, loss included, as one graph without breaks: no branch on data,
    no value read back to the host. Every block takes a contiguous input that requires a gradient, so that all
    blocks of one kind share one compiled graph.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        encoder_layers: int,
        encoder_width: int,
        encoder_heads: int,
        decoder_layers: int,
        decoder_width: int,
        decoder_heads: int,
        vocabulary_size: int,
        max_tokens: int,
        dropout: float = 0.0,
    ) -> None:
        """Build the network; initial weights are drawn from torch's global generator."""
        super().__init__()
        self.max_tokens = max_tokens
        self.encoder = ImageEncoder(
            image_size=image_size,
            patch_size=patch_size,
            layers=encoder_layers,
            width=encoder_width,
            heads=encoder_heads,
            dropout=dropout,
        )
        self.decoder = TextDecoder(
            vocabulary_size=vocabulary_size,
            max_tokens=max_tokens,
            layers=decoder_layers,
            width=decoder_width,
            heads=decoder_heads,
            image_width=encoder_width,
            dropout=dropout,
        )
        self.tail = LanguageTail(decoder_width, vocabulary_size)

    def forward(self, images_BCHW: Tensor, tokens_BS: Tensor, *, score: bool = True) -> Any:
        """Score captions: uint8 images [B, 3, H, W]; int64 tokens [B, S], beginning ... end, then padding.

        Returns (mean loss in nats a target, right predictions, targets), 0-D, over targets that are not padding; the
        last two are None in training mode. ``score=False``: logits [B, S - 1, V] of the next token at each position.
        """
        image_BNE = self.encoder(images_BCHW)
        # Contiguous, so that no compiled region sees strides that depend on the length of the batch's longest caption.
        x_BSD = self.decoder(tokens_BS[:, :-1].contiguous(), image_BNE)
        return self.tail(x_BSD, tokens_BS[:, 1:].contiguous() if score else None)

    @torch.no_grad()
    def generate(self, images_BCHW: Tensor, *, begin: int, end: int, max_new_tokens: int) -> Tensor:
        """Caption uint8 images greedily; returns int64 tokens [B, S], ``begin`` first, ``end`` repeated once reached.

        Draws no random numbers and leaves every submodule's mode as it was. Compiled regions run eagerly meanwhile:
        each new length would otherwise be compiled anew.
        """
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                image_BNE = self.encoder(images_BCHW)
                tokens_BS = torch.full((len(images_BCHW), 1), begin, dtype=torch.long, device=images_BCHW.device)
                for _ in range(min(max_new_tokens, self.max_tokens)):
                    logits_BV = self.tail.logits(self.decoder(tokens_BS, image_BNE)[:, -1])
                    ended_B = tokens_BS[:, -1] == end
                    next_B = torch.where(ended_B, end, logits_BV.argmax(dim=-1))
                    tokens_BS = torch.cat((tokens_BS, next_B[:, None]), dim=1)
                    if bool((next_B == end).all()):
                        break
        finally:
            for module, training in modes:
                module.training = training
        return tokens_BS
