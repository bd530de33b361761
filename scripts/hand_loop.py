"""The loop that people write by hand: autocast, backward, clipping, step, schedule, over any LightningModule."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor


def placed(module: L.LightningModule, device: torch.device) -> L.LightningModule:
    """Give the module its weights and its device, as Lightning does before it asks for optimizers, and let it train."""
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    module.trainer = trainer
    module.configure_model()
    module.trainer = None  # ``self.log`` of a module in a hand-written loop goes nowhere
    return module.to(device).train()


class HandLoop:
    """One training step after the other; fetching and moving batches is the caller's.

    Args:
        module: On its device, in training mode; what it calls may be compiled.
        precision: ``bf16-mixed`` enters autocast, anything else is left to the module.
        clip: Largest norm of the gradients; None = no clipping.
    """

    def __init__(self, module: L.LightningModule, *, device: torch.device, precision: str, clip: float | None) -> None:
        self.optimizer, self._schedule = optimizer_and_schedule(module)
        self._module, self._clip = module, clip
        self._parameters = list(module.parameters())
        self._autocast: contextlib.AbstractContextManager[Any] = (
            torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
        )

    def step(self, batch: Any) -> Tensor:
        """Train on a batch that is on the device; returns its loss, detached."""
        self.optimizer.zero_grad()
        with self._autocast:
            loss: Any = self._module.training_step(batch, 0)
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return loss.detach()


def optimizer_and_schedule(module: L.LightningModule) -> tuple[torch.optim.Optimizer, Any]:
    """What ``configure_optimizers`` returned, taken apart. Raises ValueError for what such a loop has no place for."""
    configured: Any = module.configure_optimizers()
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    schedule = configured.get("lr_scheduler") if isinstance(configured, dict) else None
    if not isinstance(schedule, dict) or schedule.get("interval") != "step":
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: a hand-written loop takes one optimizer, alone or with an "
            "lr_scheduler of interval 'step'"
        )
    return configured["optimizer"], schedule["scheduler"]
