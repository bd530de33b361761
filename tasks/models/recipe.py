"""Recipe: AdamW under a linear warm-up and a cosine, as every task here trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What ``LightningModule.configure_optimizers`` returns, from five numbers."""

    learning_rate: float
    """Highest, reached after the warm-up."""
    weight_decay: float
    """Decoupled decay of weights; biases and norms (tensors of fewer than two dimensions) have none."""
    warmup_steps: int
    """Optimizer steps of linear warm-up."""
    final_share: float
    """Learning rate at ``max_steps`` as a share of ``learning_rate``."""
    max_steps: int
    """Length of the schedule in optimizer steps."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay of its two running means."""

    def configure(self, parameters: Iterable[nn.Parameter]) -> OptimizerLRSchedulerConfig:
        """AdamW over what is trainable of ``parameters``, fused where it can be; its schedule moves by step."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            fused=_can_fuse(trainable) or None,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def share(self, step: int) -> float:
        """Learning rate at ``step`` as a share of the highest."""
        warmup_steps = min(self.warmup_steps, self.max_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, self.max_steps - warmup_steps))
        return self.final_share + (1.0 - self.final_share) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    """Whether AdamW has one fused kernel for all of them."""
    return {parameter.device.type for parameter in parameters} in ({"cuda"}, {"cpu"})
