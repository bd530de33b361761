"""Passes: single training steps on a batch at hand, run as Lightning's loops run them but without a trace in its state.

What a pass changes in the model is put back by ``trainer.snapshot``; this module keeps callbacks, loggers and the
results of ``self.log`` out of it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from torch import Tensor

Inspect = Callable[[Tensor], None]
"""Called with the loss between backward and optimizer step, gradients in place, not yet clipped."""


def why_not(trainer: L.Trainer) -> str | None:
    """Why no pass can be run for this training, or None when one can."""
    if not trainer.lightning_module.automatic_optimization:
        return "the module optimizes by hand (automatic_optimization=False)"
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return f"{type(trainer.strategy).__name__} keeps state that cannot be copied and restored"
    if len(trainer.optimizers) != 1:
        return f"the module has {len(trainer.optimizers)} optimizers"
    return None


class Passes:
    """Runs passes of one training.

    The pieces are Lightning's own (its closure and its hooks), some of them private to it: whatever the module or a
    strategy has overridden is in force. See ``_AutomaticOptimization`` in
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/loops/optimization/automatic.py
    """

    def __init__(self, trainer: L.Trainer, *, cuda_graphs: bool) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._cuda_graphs = cuda_graphs

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing that happens inside is logged or seen by callbacks."""
        trainer, module = self._trainer, self._module
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loggers, hook = trainer.loggers, module._current_fx_name
        trainer.callbacks, trainer.loggers = [], [DummyLogger() for _ in loggers]  # type: ignore[attr-defined]
        silenced = {method: vars(module).get(method) for method in ("log", "log_dict")}
        for method in silenced:
            vars(module)[method] = _log_nothing
        try:
            yield
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
            module._current_fx_name = hook
            for method, before in silenced.items():
                vars(module).pop(method)
                if before is not None:
                    vars(module)[method] = before

    def train(self, batch: Any, inspect: Inspect | None = None, *, together: bool = True) -> Tensor:
        """Forward and backward of a training batch; returns the loss, detached, divided by the micro-batches of a step.

        ``together=False`` leaves the gradients of the processes apart, so that one of them may fail alone.
        """
        closure = self._closure(batch, inspect)
        with contextlib.nullcontext() if together else self._apart():
            return closure()

    def step(self, batch: Any, inspect: Inspect | None = None) -> Tensor:
        """A whole optimizer step on one batch, clipping and scaling included; returns the loss, detached."""
        trainer, losses = self._trainer, []
        closure = self._closure(batch, inspect)

        def keep_loss() -> Tensor:
            losses.append(closure())
            return losses[-1]

        optimizer = trainer.strategy._lightning_optimizers[0]
        call._call_lightning_module_hook(trainer, "optimizer_step", trainer.current_epoch, 0, optimizer, keep_loss)
        return losses[-1]

    def evaluate(self, batch: Any) -> None:
        """A validation step on ``batch``, with the training flags as Lightning's validation sets them."""
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop.val_loop
        flags = [(module, module.training) for module in self._module.modules()]
        self._mark()
        try:
            self._module.eval()
            with torch.inference_mode() if loop.inference_mode else torch.no_grad():
                call._call_lightning_module_hook(trainer, "on_validation_epoch_start")
                call._call_lightning_module_hook(trainer, "on_validation_batch_start", batch, 0)
                arguments = loop._build_step_args_from_hook_kwargs(
                    loop._build_kwargs(batch, 0, None), "validation_step"
                )
                call._call_strategy_hook(trainer, "validation_step", *arguments)
        finally:
            for module, training in flags:
                module.training = training

    def _closure(self, batch: Any, inspect: Inspect | None) -> Callable[[], Tensor]:
        loop = self._trainer.fit_loop.epoch_loop
        self._mark()
        call._call_lightning_module_hook(self._trainer, "on_train_batch_start", batch, 0)
        arguments = loop._build_kwargs(OrderedDict(), batch, 0)
        closure = loop.automatic_optimization._make_closure(arguments, self._trainer.optimizers[0], 0)

        def run() -> Tensor:
            loss = closure()
            if loss is None:
                raise SkippedStep("training_step returned None on the first batch")
            if inspect is not None:
                inspect(loss)
            return loss.detach()

        return run

    def _apart(self) -> AbstractContextManager[Any]:
        strategy = self._trainer.strategy
        if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, torch.nn.parallel.DistributedDataParallel):
            return strategy.block_backward_sync()
        return contextlib.nullcontext()

    def _mark(self) -> None:
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()


class SkippedStep(RuntimeError):
    """The training step asked for no backward: there is nothing to rehearse on this batch."""


def _log_nothing(*_: Any, **__: Any) -> None:
    """In the place of ``self.log`` and ``self.log_dict``."""
