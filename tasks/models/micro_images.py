"""Micro models of images: a plain convolutional network, and convolution with attention over its positions.

Shape letters: B batch, C channels, H height, W width, S flattened positions, D features.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.micro_kinds import POOLED
from tasks.models.class_scores import Scores
from tasks.models.micro_tail import ClassTail


class ConvNet(nn.Module):
    """Three stages of 3x3 convolution, batch norm, ReLU and max pooling, each twice as wide as the one before."""

    def __init__(self, width: int, classes: int) -> None:
        """``width``: channels of the first stage."""
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            # No bias: the norm after it would take it away.
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.tail = ClassTail(4 * width, classes)

    def forward(self, x_BCHW: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of images float32 [B, 3, H, W]; with targets the loss, see ``ClassTail``."""
        scores: Tensor | Scores = self.tail(self.layers(x_BCHW).mean(dim=(2, 3)), targets_B)
        return scores


class ComplexMixed(nn.Module):
    """Convolution, batch norm, ReLU and max pooling; single-head self-attention over the flattened positions with a
    residual; adaptive pooling to 8x8; two linear layers.
    """

    def __init__(self, width: int, classes: int) -> None:
        """``width``: channels of the convolution and features of the attention."""
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.hidden = nn.Linear(POOLED**2 * width, 8 * width)
        self.tail = ClassTail(8 * width, classes)

    def forward(self, x_BCHW: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of images float32 [B, 3, H, W]; with targets the loss, see ``ClassTail``."""
        x_BDHW = F.max_pool2d(self.norm(self.convolution(x_BCHW)).relu(), 2)
        x_BSD = x_BDHW.flatten(2).transpose(1, 2)
        query_BSD, key_BSD, value_BSD = self.query_key_value(x_BSD).chunk(3, dim=-1)
        mixed_B1SD = F.scaled_dot_product_attention(query_BSD[:, None], key_BSD[:, None], value_BSD[:, None])
        x_BSD = x_BSD + self.output(mixed_B1SD[:, 0])
        x_BDHW = x_BSD.transpose(1, 2).unflatten(2, x_BDHW.shape[2:])
        pooled_BD = F.adaptive_avg_pool2d(x_BDHW, POOLED).flatten(1)
        scores: Tensor | Scores = self.tail(self.hidden(pooled_BD).relu(), targets_B)
        return scores
