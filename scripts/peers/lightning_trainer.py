"""Peer: Lightning as its documentation compiles: of a compiled module, the Trainer compiles ``training_step`` whole.

``lightning_eager``, ``lightning_compile`` and ``lightning_reduce_overhead``.
https://lightning.ai/docs/pytorch/stable/advanced/compile.html
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from scripts.peers.work import Work
from trainer.build import precision_arguments
from trainer.loops.lightning import LightningLoop
from trainer.telemetry.telemetry import Telemetry


def train(work: Work, *, compiled: bool = True, mode: str | None = None) -> None:
    settings = work.config.trainer
    trainer = L.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices or 1,
        strategy=settings.strategy,
        **precision_arguments(settings),  # its own bf16 refuses to clip gradients of a fused optimizer
        max_steps=settings.max_steps,
        max_epochs=-1,
        gradient_clip_val=settings.gradient_clip_val,
        limit_val_batches=0,
        log_every_n_steps=settings.log_every_n_steps,
        enable_checkpointing=False,
        callbacks=[Measured(work.telemetry)],
        default_root_dir=work.directory,
    )
    module: Any = torch.compile(work.module, backend=work.backend, mode=mode) if compiled else work.module
    trainer.fit(module, datamodule=work.data)


class Measured(L.Callback):
    """Calls the telemetry where our own callback does, and nothing else."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._telemetry.start(LightningLoop(trainer))

    def on_train_batch_start(self, *_: Any) -> None:
        self._telemetry.batch_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._telemetry.batch_end(outputs["loss"], batch)

    def on_train_end(self, *_: Any) -> None:
        self._telemetry.finish()
