"""Throwaway: a training that is only looked at: on one device, without guards, and nothing is left of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L

from strategies import Strategy
from trainer.settings import Config


def throwaway(config: Config, strategies: Iterable[Strategy], **trainer_options: Any) -> Config:
    """``config`` as it is looked at under ``strategies``; ``trainer_options`` are further ones of ``TrainerConfig``."""
    settings = dataclasses.replace(
        config.trainer, devices=1, strategy="auto", measure_peak=False, progress="none", **trainer_options
    )
    return dataclasses.replace(
        config,
        compile={strategy.name: strategy for strategy in strategies},
        trainer=settings,
        parity="off",
        on_compile_error="fail",
        on_slower="warn",
        resume=None,
        repeat=None,
        profile="off",
    )


def throwaway_trainer(folder: str, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Lightning's Trainer for any module, which writes nothing but what a module itself writes into ``folder``."""
    return L.Trainer(
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(folder),
        num_sanity_val_steps=0,
        **options,
    )
