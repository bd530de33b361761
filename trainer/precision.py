"""Precision of a run: the automatic choice, and autocast that lets fused optimizers clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
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


class Fp16Mixed(MixedPrecision):
    """fp16 autocast with a gradient scaler. Gradients of a fused optimizer are unscaled before its step as those of any
    other, so that they can be clipped; torch's scaler then tells the step that there is nothing left to unscale."""

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: L.LightningModule,
        closure: Callable[[], Any],
        **named: Any,
    ) -> Any:
        """Unscale, clip, and step unless a gradient is not finite."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return super().optimizer_step(optimizer, model, closure, **named)
        assert self.scaler is not None
        result = closure()
        if result is None and model.automatic_optimization:  # no backward, nothing to unscale
            self._after_closure(model, optimizer)
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **named)
        self.scaler.update()
        return stepped

    def clip_gradients(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
        """Clip as in full precision: the gradients are unscaled."""
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
    device = "cuda" if on_cuda(config) else "cpu"
    if config.strategy in ("auto", "ddp"):  # sharded strategies bring their own
        if precision == "bf16-mixed":
            return {"plugins": [Bf16Mixed("bf16-mixed", device)]}
        if precision == "16-mixed" and config.accelerator != "mps":
            # On a CPU, too, where Lightning's own choice would be bf16 after all.
            return {"plugins": [Fp16Mixed("16-mixed", device, torch.amp.GradScaler(device))]}
    return {"precision": precision, "plugins": []}


def on_cuda(config: TrainerConfig) -> bool:
    """Whether the run's accelerator is a CUDA GPU."""
    return config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def device_of(config: TrainerConfig) -> torch.device:
    """The device of a run on one: what Lightning would take."""
    return torch.device("cuda", 0) if on_cuda(config) else torch.device("cpu")
