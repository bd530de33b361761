"""The micro networks: of vectors, of images and of sequences, each with its head and loss.

Transformer blocks are post-norm with GELU, the layout of ``torch.nn.TransformerEncoderLayer``, attention by
``scaled_dot_product_attention``.

Shape letters: B batch, C channels, H height, W width, S positions, D features, K classes, ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tasks.lightning_module import Attention, Scores, ScoringTail, mlp
from tasks.micro import CLASSES, VOCABULARY


class MicroNet(nn.Module):
    """Base of all: features, then the tail, which a subclass makes last."""

    tail: ScoringTail

    def features(self, x: Tensor) -> Tensor:
        """What the tail scores, [..., D]."""
        raise NotImplementedError

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | Scores:
        """Scores of a batch of inputs; with int64 targets the loss, see ``ScoringTail``."""
        return self.tail(self.features(x), targets)


class SimpleLinear(MicroNet):
    """One linear layer with a ReLU, and the head: so little work that calling it is what costs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.tail = class_tail(width)

    def features(self, x_BD: Tensor) -> Tensor:
        return self.hidden(x_BD).relu()


class GraphBreaker(MicroNet):
    """Two linear layers with a print and a branch on data between them: what users write and compilers cannot trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.tail = class_tail(width)

    def forward(self, x_BD: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Scores of vectors [B, D]; with targets the loss. Breaks here are in no function called."""
        x_BD = self.first(x_BD)
        print(end="")  # prints nothing, so that a run stays readable; to the compiler it is a print like any other
        x_BD = x_BD.relu() if x_BD.mean() > 0 else x_BD.tanh()
        return self.tail(self.second(x_BD).relu(), targets_B)


class ConvNet(MicroNet):
    """Three stages of 3x3 convolution, batch norm, ReLU and max pooling, each twice as wide as the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            # No bias: the norm after it would take it away.
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.tail = class_tail(4 * width)

    def features(self, x_BCHW: Tensor) -> Tensor:
        return self.layers(x_BCHW).mean(dim=(2, 3))


class TransformerBlock(nn.Module):
    """Self-attention and an MLP four widths wide, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """``causal``: a position attends to itself and to earlier ones only."""
        super().__init__()
        self.attention = Attention(width, heads, 0.0, causal=causal)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = mlp(width, nn.GELU())
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, x_BSD))
        return self.mlp_norm(x_BSD + self.mlp(x_BSD))


class SingleBlock(MicroNet):
    """One transformer block over sequences of one length, with a head of a few classes on every position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = TransformerBlock(width, heads(width), causal=False)
        self.tail = class_tail(width)

    def features(self, x_BSD: Tensor) -> Tensor:
        return self.block(x_BSD)


class RaggedLabeller(MicroNet):
    """Labels every token of sequences of any length. It is causal, so that no real position sees padding."""

    def __init__(self, width: int, *, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads(width), causal=True) for _ in range(layers))
        self.tail = class_tail(width)

    def features(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return x_BSD


NETWORKS: dict[str, Callable[..., MicroNet]] = {
    "simple_linear": SimpleLinear,
    "convnet": ConvNet,
    "transformer_block": SingleBlock,
    "graph_breaker": GraphBreaker,
    "ragged": RaggedLabeller,
}


def class_tail(width: int) -> ScoringTail:
    return ScoringTail(nn.Identity(), nn.Linear(width, CLASSES))


def heads(width: int) -> int:
    """Attention heads of 64 features each, or a single one where the width does not divide so."""
    return width // 64 if width % 64 == 0 else 1
