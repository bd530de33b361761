"""Class scores: mean loss and right predictions of logits, with targets that are ignored.

Shape letters: K classes, T targets of the batch, ... any leading dimensions.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target that is no target: padding, or a token that was not masked. torch's default for ``cross_entropy``."""

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Mean loss in nats a target, right predictions and targets, all 0-D; the last two are None in training mode."""


def class_scores(logits_K: Tensor, targets: Tensor, *, training: bool, ignored: int = IGNORED) -> Scores:
    """Scores of logits [..., K] for int64 targets [...]; those that are ``ignored`` are no targets.

    In training mode the last two are None: an argmax over the classes is not paid for on the training path.
    """
    logits_TK, targets_T = logits_K.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits_TK, targets_T, ignore_index=ignored)
    if training:
        return loss, None, None
    return loss, *right_predictions(logits_TK, targets_T, ignored=ignored)


def right_predictions(logits_TK: Tensor, targets_T: Tensor, *, ignored: int) -> tuple[Tensor, Tensor]:
    """Number of targets that have the largest logit, and of targets, 0-D."""
    real_T = targets_T != ignored
    return ((logits_TK.argmax(dim=-1) == targets_T) & real_T).sum(), real_T.sum()
