"""MicroModule: the LightningModule around a micro network."""

from __future__ import annotations

from torch import Tensor

from tasks.data.generated import GeneratedBatch
from tasks.models.scored_module import ScoredModule


class MicroModule(ScoredModule):
    """Trains a micro network; validation logs ``val/loss`` and ``val/accuracy``."""

    def inputs(self, batch: GeneratedBatch) -> tuple[Tensor]:
        """Inputs alone."""
        return (batch.inputs,)
