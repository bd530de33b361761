"""The micro models' common end: scores of classes, and the loss where there are targets.

Shape letters: D features, K classes, ... any leading dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from tasks.models.class_scores import Scores, class_scores


class ClassTail(nn.Module):
    """Head and loss as one region, so that a compiler may fuse the loss into the head."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x_D: Tensor, targets: Tensor | None) -> Tensor | Scores:
        """Logits [..., K] of features [..., D]; with int64 targets [...], their ``Scores``."""
        logits_K: Tensor = self.head(x_D)
        return logits_K if targets is None else class_scores(logits_K, targets, training=self.training)
