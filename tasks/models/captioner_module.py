"""Captioner: the LightningModule around CaptionNet; validation writes captioned images to TensorBoard."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from tasks.data.batch import CaptionBatch
from tasks.data.caption_data_module import CaptionDataModule
from tasks.data.tokenizer import BEGIN, END
from tasks.models.caption_strip import caption_table, draw_strip
from tasks.models.captioner import CaptionNet
from tasks.models.recipe import Recipe

STRIP_IMAGES = 8
"""Validation images drawn with their captions."""


class Captioner(L.LightningModule):
    """Trains a CaptionNet with AdamW under a linear warm-up and a cosine."""

    def __init__(self, net: CaptionNet, recipe: Recipe) -> None:
        super().__init__()
        self.net = net
        self._recipe = recipe
        self._sums: Tensor | None = None
        self._strip: tuple[Tensor, Tensor] | None = None

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        """Mean loss in nats a target, 0-D. Logs nothing: one ``self.log`` costs more than a small step."""
        loss: Tensor = self.net(batch.images, batch.tokens)[0]
        return loss

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self._sums = self._strip = None

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Add up loss, right predictions and targets on the device."""
        loss, correct, count = self.net(batch.images, batch.tokens)
        # float64: float32 counts exactly to 16.7 million only. MPS has none.
        precise = torch.float32 if loss.device.type == "mps" else torch.float64
        sums = torch.stack((loss.to(precise) * count, correct.to(precise), count.to(precise)))
        self._sums = sums if self._sums is None else self._sums + sums
        if batch_idx == 0:
            self._strip = (batch.images[:STRIP_IMAGES], batch.tokens[:STRIP_IMAGES])

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and ``val/token_accuracy`` over all ranks; draw captions where there is a TensorBoard."""
        if self._sums is None:
            return
        # The sums are added over ranks before dividing: a rank with more tokens weighs more.
        loss_sum, correct, count = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.log("val/loss", (loss_sum / count).float(), sync_dist=True)
        self.log("val/token_accuracy", (correct / count).float(), sync_dist=True)
        self._write_captions()
        self._sums = self._strip = None

    def _write_captions(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        logger = next((logger for logger in self.loggers if isinstance(logger, TensorBoardLogger)), None)
        if logger is None or self._strip is None or not isinstance(data, CaptionDataModule):
            return
        # One rank alone may not run sharded parameters: it would wait for the others' shards.
        sharded = any(hasattr(parameter, "device_mesh") for parameter in self.net.parameters())
        if sharded or not self.trainer.is_global_zero or self.trainer.sanity_checking:
            return
        images, tokens = self._strip
        with self.trainer.precision_plugin.forward_context():
            generated = self.net.generate(images, begin=BEGIN, end=END, max_new_tokens=tokens.shape[1])
        true_texts = [data.decode(row) for row in tokens.tolist()]
        texts = [data.decode(row) for row in generated.tolist()]
        strip = draw_strip(images.cpu(), true_texts, texts)
        logger.experiment.add_image("captions/strip", strip, self.global_step, dataformats="HWC")
        logger.experiment.add_text("captions/table", caption_table(true_texts, texts), self.global_step)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW and its schedule, by the recipe."""
        return self._recipe.configure(self.parameters())
