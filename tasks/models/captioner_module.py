"""Captioner: the LightningModule around CaptionNet; validation writes captioned images to TensorBoard."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from tasks.data.batch import CaptionBatch
from tasks.data.caption_data_module import CaptionDataModule
from tasks.data.tokenizer import BEGIN, END
from tasks.models.caption_strip import caption_table, draw_strip
from tasks.models.captioner import CaptionNet
from tasks.models.class_scores import Scores
from tasks.models.recipe import Recipe
from tasks.models.scored_module import ScoredModule

STRIP_IMAGES = 8
"""Validation images drawn with their captions."""


class Captioner(ScoredModule):
    """Trains a CaptionNet; every validation draws captions."""

    accuracy = "val/token_accuracy"

    net: CaptionNet

    def __init__(self, build: Callable[[], CaptionNet], recipe: Recipe, *, initialise: str) -> None:
        """As ``ScoredModule``."""
        super().__init__(build, recipe, initialise=initialise)
        self._strip: tuple[Tensor, Tensor] | None = None

    def scores(self, batch: CaptionBatch) -> Scores:
        """Loss in nats a target; the network takes the targets from the tokens."""
        scores: Scores = self.net(batch.images, batch.tokens)
        return scores

    def predict_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        """Logits [B, S - 1, V] of the next token at each position of the given captions."""
        logits: Tensor = self.net(batch.images, batch.tokens, score=False)
        return logits

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        super().on_validation_epoch_start()
        self._strip = None

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        """Add up scores, and keep the first images to draw."""
        super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self._strip = (batch.images[:STRIP_IMAGES], batch.tokens[:STRIP_IMAGES])

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and ``val/token_accuracy`` over all ranks; draw captions where there is a TensorBoard."""
        super().on_validation_epoch_end()
        self._write_captions()
        self._strip = None

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
