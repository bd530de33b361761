"""MaskedModule: the LightningModule around a BERT that learns to predict masked tokens."""

from __future__ import annotations

from torch import Tensor

from tasks.data.masked_batch import MaskedBatch
from tasks.models.scored_module import ScoredModule


class MaskedModule(ScoredModule):
    """Trains a BERT; validation logs ``val/loss`` and ``val/token_accuracy``, both over masked tokens."""

    accuracy = "val/token_accuracy"

    def inputs(self, batch: MaskedBatch) -> tuple[Tensor, Tensor | None]:
        """Tokens and the mask of padding."""
        return batch.tokens, batch.mask
