"""LanguageModel: the LightningModule around any network that predicts the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tasks.data.text_batch import TextBatch
from tasks.models.materialise import is_large
from tasks.models.recipe import Recipe
from tasks.models.scored_module import ScoredModule


class LanguageModel(ScoredModule):
    """Trains a network on TextBatches; large ones lose their gradients when memory needs it."""

    accuracy = "val/token_accuracy"

    def __init__(self, build: Callable[[], nn.Module], recipe: Recipe, *, initialise: str) -> None:
        """As ``ScoredModule``."""
        super().__init__(build, recipe, initialise=initialise)
        self.large = is_large(self.net)

    def inputs(self, batch: TextBatch) -> tuple[Tensor]:
        """All tokens but the last."""
        return (batch.inputs,)

    def on_train_batch_end(self, outputs: Any, batch: TextBatch, batch_idx: int) -> None:
        """Free the gradients of a large network as soon as they are used.

        Lightning does so after the next forward, whose activations would have to fit beside them: 4 bytes a parameter.
        """
        if self.large and self.trainer.accumulate_grad_batches == 1:
            self.zero_grad(set_to_none=True)
