"""Passes: single training steps on a batch at hand, run as Lightning's loops run them but without a trace in its state.

What a pass changes in the model is put back by ``trainer.guards.snapshot``; this module keeps callbacks, loggers, the
profiler and the results of ``self.log`` out of it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from torch import Tensor

from strategies.as_capturing import as_capturing
from trainer.guards.manual import ByHand, Span

Inspect = Callable[[Tensor], None]
"""Called with the loss between backward and optimizer step, gradients in place, not yet clipped; where the module
optimizes by hand, after every ``manual_backward``."""


def why_not(trainer: L.Trainer) -> str | None:
    """Why no pass can be run for this training, or None when one can."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return f"{type(trainer.strategy).__name__} keeps state that cannot be copied and restored"
    if getattr(trainer.strategy.model, "static_graph", False):
        return "DDP with static_graph=True takes what its first backward does for what all later ones do"
    if trainer.lightning_module.automatic_optimization:
        return None if len(trainer.optimizers) == 1 else f"the module has {len(trainer.optimizers)} optimizers"
    if not any(optimizer.param_groups for optimizer in trainer.optimizers):  # Lightning has a mock in place of none
        return "the module optimizes by hand, and not with optimizers of configure_optimizers, which could be restored"
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
        self._by_hand = None if self._module.automatic_optimization else ByHand(trainer, self._arguments)

    @property
    def by_hand(self) -> bool:
        """Whether the module steps its optimizers itself."""
        return self._by_hand is not None

    @property
    def span(self) -> Span:
        """How long a step is; by hand, after the first one has run."""
        by_hand = self._by_hand
        return Span(batches=1, steps=1) if by_hand is None or by_hand.span is None else by_hand.span

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing that happens inside is logged, profiled or seen by callbacks."""
        trainer, module = self._trainer, self._module
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loggers, hook = trainer.loggers, module._current_fx_name
        profiler = trainer.profiler  # type: ignore[attr-defined]
        trainer.callbacks, trainer.loggers = [], [DummyLogger() for _ in loggers]  # type: ignore[attr-defined]
        # By hand, it is told when an optimizer step begins and not when that ends with an error.
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
        silenced = {method: vars(module).get(method) for method in ("log", "log_dict")}
        for method in silenced:
            vars(module)[method] = _log_nothing
        try:
            yield
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
            trainer.profiler = profiler  # type: ignore[attr-defined]
            module._current_fx_name = hook
            for method, before in silenced.items():
                vars(module).pop(method, None)
                if before is not None:
                    vars(module)[method] = before

    def train(self, batch: Any, inspect: Inspect | None = None, *, together: bool = True) -> Tensor:
        """Forward and backward of a training batch; returns the loss, detached, divided by the micro-batches of a step.

        ``together=False`` leaves the gradients of the processes apart, so that one of them may fail alone. By hand, its
        parts cannot be told apart, and it is a whole step.
        """
        if self._by_hand is not None:
            return self._stepped_by_hand(batch, inspect, together=together)
        closure = self._closure(batch, inspect)
        with contextlib.nullcontext() if together else self.apart():
            return closure()

    def step(self, batch: Any, inspect: Inspect | None = None) -> Tensor:
        """A whole optimizer step on one batch, clipping and scaling included; returns the loss, detached.

        By hand it takes as many training steps as ``span`` says, and what they returned is returned, ``(numbers,)``.
        """
        if self._by_hand is not None:
            return self._stepped_by_hand(batch, inspect, together=True)
        losses: list[Tensor] = []
        closure = self._closure(batch, inspect)

        def keep_loss() -> Tensor:
            losses.append(closure())
            return losses[-1]

        self._optimizer_step(keep_loss)
        return losses[-1]

    def forward(self, batch: Any) -> Any:
        """``training_step`` alone."""
        return call._call_strategy_hook(self._trainer, "training_step", *self._arguments(batch, 0).values())

    def optimize(self) -> None:
        """An optimizer step with the gradients that are there, clipping and scaling included."""
        loss = torch.zeros((), device=self._trainer.strategy.root_device)
        self._optimizer_step(lambda: loss)

    def evaluate(self, batch: Any, step: str = "validation_step") -> Any:
        """A validation step on ``batch``, with the training flags as Lightning's validation sets them; returns what it
        returned. ``step="training_step"`` runs the forward of that one so."""
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop.val_loop
        flags = [(module, module.training) for module in self._module.modules()]
        self._mark()
        try:
            self._module.eval()
            with as_capturing(False), torch.inference_mode() if loop.inference_mode else torch.no_grad():
                if step == "training_step":
                    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
                    return call._call_strategy_hook(trainer, step, *arguments.values())
                call._call_lightning_module_hook(trainer, "on_validation_epoch_start")
                call._call_lightning_module_hook(trainer, "on_validation_batch_start", batch, 0)
                given = loop._build_step_args_from_hook_kwargs(loop._build_kwargs(batch, 0, None), step)
                return call._call_strategy_hook(trainer, step, *given)
        finally:
            for module, training in flags:
                module.training = training

    def _optimizer_step(self, closure: Callable[[], Tensor]) -> None:
        trainer = self._trainer
        optimizer = trainer.strategy._lightning_optimizers[0]
        call._call_lightning_module_hook(trainer, "optimizer_step", trainer.current_epoch, 0, optimizer, closure)

    def _closure(self, batch: Any, inspect: Inspect | None) -> Callable[[], Tensor]:
        loop = self._trainer.fit_loop.epoch_loop
        arguments = self._arguments(batch, 0)
        closure = loop.automatic_optimization._make_closure(arguments, self._trainer.optimizers[0], 0)

        def run() -> Tensor:
            loss = closure()
            if loss is None:
                raise SkippedStep("training_step returned None on the first batch")
            if inspect is not None:
                inspect(loss)
            return loss.detach()

        return run

    def _stepped_by_hand(self, batch: Any, inspect: Inspect | None, *, together: bool) -> Tensor:
        assert self._by_hand is not None
        returned = self._by_hand.step(batch, inspect, contextlib.nullcontext if together else self.apart)
        if returned is None:
            raise SkippedStep("training_step took no manual_backward and no optimizer step on the first batch")
        return torch.stack(returned) if returned else torch.empty(0)

    def _arguments(self, batch: Any, number: int) -> OrderedDict[str, Any]:
        self._mark()
        call._call_lightning_module_hook(self._trainer, "on_train_batch_start", batch, number)
        return self._trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, a backward leaves the gradients of the processes apart."""
        strategy = self._trainer.strategy
        model = strategy.model
        if not isinstance(strategy, DDPStrategy) or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            yield
            return
        try:
            with strategy.block_backward_sync():
                yield
        finally:
            if model.find_unused_parameters:
                # It goes on counting what is used here as used, to be reduced with the gradients to come. Of two
                # networks trained in turns, the other one then has none: "gradient which is undefined".
                model.reducer._reset_state()

    def _mark(self) -> None:
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()


class SkippedStep(RuntimeError):
    """The training step asked for no backward: there is nothing to rehearse on this batch."""


def _log_nothing(*_: Any, **__: Any) -> None:
    """In the place of ``self.log`` and ``self.log_dict``."""
