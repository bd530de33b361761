"""Next-token tail: final norm, head and loss as one module, in pieces where all logits at once take too much memory.

Shape letters: B batch, S positions, T = B x S positions in a row, C positions of a piece, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tasks.models.class_scores import Scores, right_predictions
from tasks.models.text_decoder import PAD


def next_token_losses(logits_TV: Tensor, targets_T: Tensor, reduction: str) -> Tensor:
    """Cross entropy in nats of ``logits_TV`` in any precision, computed in float32; padding is no target.

    ``log_softmax`` converts within its kernel: ``cross_entropy`` under autocast would copy all logits to float32 first,
    and their gradient back.
    """
    log_probabilities_TV = F.log_softmax(logits_TV, dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities_TV, targets_T, ignore_index=PAD, reduction=reduction)


def score(logits_TV: Tensor, targets_T: Tensor, *, training: bool) -> Scores:
    """Scores of all positions at once. In training an argmax over the vocabulary is not paid for."""
    loss = next_token_losses(logits_TV, targets_T, "mean")
    if training:
        return loss, None, None
    return loss, *right_predictions(logits_TV, targets_T, ignored=PAD)


class NextTokenTail(nn.Module):
    """Final norm, head and loss: one region, so that a compiler may fuse the loss into the head."""

    def __init__(self, norm: nn.Module, head: nn.Linear, *, loss_chunks: int = 1) -> None:
        """``loss_chunks``: pieces of the positions whose logits are there at once in training; those of more than one
        are computed again in backward."""
        super().__init__()
        self.norm = norm
        self.head = head
        self.loss_chunks = loss_chunks

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Map hidden states to the scores of ``targets_BS``; without targets to logits [B, S, V]."""
        if targets_BS is None:
            logits_BSV: Tensor = self.head(self.norm(x_BSD))
            return logits_BSV
        x_TD, targets_T = x_BSD.flatten(0, 1), targets_BS.flatten()
        if self.loss_chunks == 1 or not self.training:
            return score(self.head(self.norm(x_TD)), targets_T, training=self.training)
        pieces = zip(x_TD.chunk(self.loss_chunks), targets_T.chunk(self.loss_chunks), strict=True)
        # Nothing in a piece draws random numbers.
        sums = [
            checkpoint(self._loss_sum, x_CD, targets_C, use_reentrant=False, preserve_rng_state=False)
            for x_CD, targets_C in pieces
        ]
        return torch.stack(sums).sum() / (targets_T != PAD).sum(), None, None

    def _loss_sum(self, x_CD: Tensor, targets_C: Tensor) -> Tensor:
        return next_token_losses(self.head(self.norm(x_CD)), targets_C, "sum")
