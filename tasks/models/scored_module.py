"""ScoredModule: a LightningModule around a network that holds its loss; validation sums and logs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from tasks.models.class_scores import Scores
from tasks.models.materialise import is_on_meta, materialise, start
from tasks.models.recipe import Recipe


class ScoredModule(L.LightningModule):
    """Trains ``net``, which may be without memory until ``configure_model``, by the recipe.

    ``net(*inputs, targets)`` returns the ``Scores`` of ``tasks.models.class_scores``, ``net(*inputs)`` the logits.
    """

    accuracy = "val/accuracy"
    """Key of the share of targets that were predicted right."""

    def __init__(self, build: Callable[[], nn.Module], recipe: Recipe, *, initialise: str) -> None:
        """Build the network.

        Args:
            build: Makes the network alike each time, and draws its weights from torch's global generator.
            recipe: Optimizer and schedule.
            initialise: Where weights are drawn, see ``tasks.models.materialise.start``: now, or in ``configure_model``
                on the device under the seed that torch has now.
        """
        super().__init__()
        self.net = start(build, initialise)
        self._build, self._seed = build, torch.initial_seed()
        self._recipe = recipe
        self._sums: Tensor | None = None

    def configure_model(self) -> None:
        """Draw the weights on the device, once. Lightning calls it after ``setup`` and before it loads a checkpoint."""
        if is_on_meta(self.net):
            materialise(self.net, self._build, device=self.trainer.strategy.root_device, seed=self._seed)

    def cpu(self) -> Self:
        """Stay as it is where the weights are not drawn yet: Lightning tidies up by this call when ``setup`` has
        refused to train, and torch's error would take the place of the refusal."""
        return self if is_on_meta(self.net) else super().cpu()

    def inputs(self, batch: Any) -> tuple[Tensor | None, ...]:
        """What of ``batch`` the network reads beside the targets."""
        raise NotImplementedError

    def scores(self, batch: Any) -> Scores:
        """Mean loss, right predictions and targets of ``batch``, 0-D; the last two are None in training mode."""
        scores: Scores = self.net(*self.inputs(batch), batch.targets)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss, 0-D. Logs nothing: one ``self.log`` costs more than a small step."""
        return self.scores(batch)[0]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits of the batch."""
        logits: Tensor = self.net(*self.inputs(batch))
        return logits

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self._sums = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add up loss, right predictions and targets on the device."""
        loss, correct, count = self.scores(batch)
        assert correct is not None, "validation runs in eval mode"
        assert count is not None
        # float64: float32 counts exactly to 16.7 million only. MPS has none.
        precise = torch.float32 if loss.device.type == "mps" else torch.float64
        # A batch without a target has no mean loss (nan) and weighs nothing.
        weighted = torch.where(count > 0, loss.to(precise), 0.0) * count
        sums = torch.stack((weighted, correct.to(precise), count.to(precise)))
        self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and the accuracy over all ranks."""
        if self._sums is None:
            return
        # The sums are added over ranks before dividing: a rank with more targets weighs more.
        loss_sum, correct, count = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.log("val/loss", (loss_sum / count).float(), sync_dist=True)
        self.log(self.accuracy, (correct / count).float(), sync_dist=True)
        self._sums = None

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW and its schedule, by the recipe."""
        return self._recipe.configure(self.parameters())
