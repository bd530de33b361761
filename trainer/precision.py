"""Precision of a run: the automatic choice, and bf16 autocast that lets fused optimizers clip."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from trainer.settings import TrainerConfig


class Bf16Mixed(MixedPrecision):
    """bf16 autocast. Lightning's own refuses to clip gradients of a fused optimizer, because such an optimizer undoes
    the gradient scaling inside its step; bf16 has no gradient scaling, so there is nothing to wait for."""

    def clip_gradients(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
        """Clip as in full precision."""
        Precision.clip_gradients(self, optimizer, *arguments, **named)


def resolve_precision(config: TrainerConfig) -> str:
    """Lightning's name for the precision; ``auto`` is bf16 autocast on a CUDA GPU that has it and fp32 elsewhere."""
    if config.precision != "auto":
        return config.precision
    has_bf16 = on_cuda(config) and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "32-true"


def precision_arguments(config: TrainerConfig) -> dict[str, Any]:
    """The arguments of ``lightning.Trainer`` that set the precision."""
    precision = resolve_precision(config)
    if precision == "bf16-mixed" and config.strategy in ("auto", "ddp"):  # sharded strategies bring their own
        return {"plugins": [Bf16Mixed("bf16-mixed", "cuda" if on_cuda(config) else "cpu")]}
    return {"precision": precision, "plugins": []}


def on_cuda(config: TrainerConfig) -> bool:
    """Whether the run's accelerator is a CUDA GPU."""
    return config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
