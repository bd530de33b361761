"""The micro models' common end: scores of classes, and the loss where there are targets.

Shape letters: D features, K classes, ... any leading dimensions.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.layers import Attention
from tasks.micro.data import VOCABULARY, GeneratedBatch
from tasks.micro.task import POOLED
from tasks.module import ScoredModule, Scores, class_scores


class ClassTail(nn.Module):
    """Head and loss as one region, so that a compiler may fuse the loss into the head."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x_D: Tensor, targets: Tensor | None) -> Tensor | Scores:
        """Logits [..., K] of features [..., D]; with int64 targets [...], their ``Scores``."""
        logits_K: Tensor = self.head(x_D)
        return logits_K if targets is None else class_scores(logits_K, targets, training=self.training)


class SimpleLinear(nn.Module):
    """One linear layer with a ReLU, and the head: so little work that calling it is what costs."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.tail = ClassTail(width, classes)

    def forward(self, x_BD: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of vectors [B, D]; with targets the loss, see ``ClassTail``."""
        scores: Tensor | Scores = self.tail(self.hidden(x_BD).relu(), targets_B)
        return scores


class LargeLinear(nn.Module):
    """Three wide linear layers, each with a ReLU, and the head: matrix products that a compiler cannot better."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.tail = ClassTail(width, classes)

    def forward(self, x_BD: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of vectors [B, D]; with targets the loss, see ``ClassTail``."""
        scores: Tensor | Scores = self.tail(self.layers(x_BD), targets_B)
        return scores


class GraphBreaker(nn.Module):
    """Two linear layers with a print and a branch on data between them: what users write and compilers cannot trace."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.tail = ClassTail(width, classes)

    def forward(self, x_BD: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of vectors [B, D]; with targets the loss, see ``ClassTail``."""
        x_BD = self.first(x_BD)
        print(end="")  # prints nothing, so that a run stays readable; to the compiler it is a print like any other
        x_BD = x_BD.relu() if x_BD.mean() > 0 else x_BD.tanh()
        scores: Tensor | Scores = self.tail(self.second(x_BD).relu(), targets_B)
        return scores


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


class TransformerBlock(nn.Module):
    """Self-attention and an MLP four widths wide, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """``causal``: a position attends to itself and to earlier ones only."""
        super().__init__()
        self.attention = Attention(width, heads, 0.0, causal=causal)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, x_BSD))
        y_BSD: Tensor = self.mlp_norm(x_BSD + self.mlp(x_BSD))
        return y_BSD


class SingleBlock(nn.Module):
    """One transformer block over sequences of one length, with a head of a few classes on every position."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.block = TransformerBlock(width, heads, causal=False)
        self.tail = ClassTail(width, classes)

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Scores of every position of float32 [B, S, D]; with targets the loss, see ``ClassTail``."""
        scores: Tensor | Scores = self.tail(self.block(x_BSD), targets_BS)
        return scores


class RaggedLabeller(nn.Module):
    """Labels every token of sequences of any length. It is causal, so that no real position sees padding."""

    def __init__(self, *, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        self.tail = ClassTail(width, classes)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Scores of every position of int64 tokens [B, S]; with targets the loss, see ``ClassTail``."""
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        scores: Tensor | Scores = self.tail(x_BSD, targets_BS)
        return scores


class MicroModule(ScoredModule):
    """Trains a micro network; validation logs ``val/loss`` and ``val/accuracy``."""

    def inputs(self, batch: GeneratedBatch) -> tuple[Tensor]:
        """Inputs alone."""
        return (batch.inputs,)
