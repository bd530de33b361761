"""LanguageModel: the LightningModule around any network that predicts the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tasks.data.text_batch import TextBatch
from tasks.models.materialise import materialise, on_meta
from tasks.models.recipe import Recipe
from tasks.models.scored_module import ScoredModule

LARGE = 1_000_000_000
"""Parameters from which on weights are drawn on the device: a host takes minutes for them."""


class LanguageModel(ScoredModule):
    """Trains a network on TextBatches; large ones get their weights, and lose their gradients, when memory needs it."""

    accuracy = "val/token_accuracy"

    def __init__(self, build: Callable[[], nn.Module], recipe: Recipe, *, initialise: str) -> None:
        """Build the network.

        Args:
            build: Makes the network, and draws its weights from torch's global generator.
            recipe: Optimizer and schedule.
            initialise: ``host`` (weights drawn now), ``device`` (in ``configure_model``, on the device, under the seed
                that torch has now) or ``auto`` (the latter from ``LARGE`` parameters on).
        """
        net = on_meta(build)
        self.large = sum(parameter.numel() for parameter in net.parameters()) >= LARGE
        on_device = initialise == "device" or (initialise == "auto" and self.large)
        super().__init__(net if on_device else build(), recipe)
        self._build, self._seed = build, torch.initial_seed()

    def configure_model(self) -> None:
        """Draw the weights on the device, once. Lightning calls it after ``setup`` and before it loads a checkpoint."""
        if any(parameter.is_meta for parameter in self.net.parameters()):
            device = self.trainer.strategy.root_device
            materialise(self.net, self._build, device=device, seed=self._seed)

    def inputs(self, batch: TextBatch) -> tuple[Tensor]:
        """All tokens but the last."""
        return (batch.inputs,)

    def on_train_batch_end(self, outputs: Any, batch: TextBatch, batch_idx: int) -> None:
        """Free the gradients of a large network as soon as they are used.

        Lightning does so after the next forward, whose activations would have to fit beside them: 4 bytes a parameter.
        """
        if self.large and self.trainer.accumulate_grad_batches == 1:
            self.zero_grad(set_to_none=True)
