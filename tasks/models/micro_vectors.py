"""Micro models of vectors: a small and a large stack of linear layers, and one that breaks the graph.

Shape letters: B batch, D features.
"""

from __future__ import annotations

from torch import Tensor, nn

from tasks.models.class_scores import Scores
from tasks.models.micro_tail import ClassTail


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
