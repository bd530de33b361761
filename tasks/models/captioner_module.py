"""Captioner: the LightningModule around CaptionNet; validation writes captioned images to TensorBoard."""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from tasks.data.batch import CaptionBatch
from tasks.data.caption_data_module import CaptionDataModule
from tasks.data.tokenizer import BEGIN, END
from tasks.models.caption_strip import caption_table, draw_strip
from tasks.models.captioner import CaptionNet

STRIP_IMAGES = 8
"""Validation images drawn with their captions."""


class Captioner(L.LightningModule):
    """Trains a CaptionNet with AdamW under a linear warm-up and a cosine."""

    def __init__(
        self,
        net: CaptionNet,
        *,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        final_share: float,
        max_steps: int,
    ) -> None:
        """``final_share``: learning rate at ``max_steps`` as a share of ``learning_rate``."""
        super().__init__()
        self.net = net
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._warmup_steps = warmup_steps
        self._final_share = final_share
        self._max_steps = max_steps
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
        """AdamW, fused where it can be; no decay for biases and norms; linear warm-up, then a cosine, by step."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self._weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self._learning_rate, betas=(0.9, 0.98), fused=_can_fuse(parameters) or None
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_share(self, step: int) -> float:
        warmup_steps = min(self._warmup_steps, self._max_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, self._max_steps - warmup_steps))
        return self._final_share + (1.0 - self._final_share) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    """Whether AdamW has one fused kernel for all of them."""
    return {parameter.device.type for parameter in parameters} in ({"cuda"}, {"cpu"})
