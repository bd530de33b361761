"""Image classifier: the LightningModule around ClassifierNet."""

from __future__ import annotations

from torch import Tensor

from tasks.data.labelled_batch import ImageBatch
from tasks.models.scored_module import ScoredModule


class ImageClassifier(ScoredModule):
    """Trains a ClassifierNet; validation logs ``val/loss`` (nats an image) and ``val/accuracy``."""

    def inputs(self, batch: ImageBatch) -> tuple[Tensor]:
        """The images."""
        return (batch.images,)
