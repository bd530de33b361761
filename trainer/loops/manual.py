"""Manual optimization (``automatic_optimization=False``): the steps of such a module, on a batch at hand.

Such a module's ``training_step`` runs backward and steps the optimizers itself, one or several, once or more, or only
for every so many batches. A step of it is therefore training steps in a row, from ``batch_idx=0`` on, until every
optimizer has stepped: what accumulates gradients for four batches is compared and timed over four, and a generator that
steps once for five steps of its critic is not left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from strategies.loop import Inspect, Span
from trainer.loops.private import replaced

MAX_BATCHES = 32
"""Training steps after which no optimizer is waited for that has not stepped yet."""


class ManualSteps:
    """Steps one module.

    The pieces are those of Lightning's manual loop, some of them private to it: optimizers count into its progress,
    from which ``trainer.global_step`` is read, and a gradient scaler scales. See ``_ManualOptimization`` in
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/loops/optimization/manual.py

    Args:
        arguments: Makes the arguments of a training step from a batch and its index, after the hook before the batch.
    """

    def __init__(self, trainer: L.Trainer, arguments: Callable[[Any, int], Any]) -> None:
        self._trainer, self._arguments = trainer, arguments
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self.span: Span | None = None
        """Known after the first step, which goes on until every optimizer has stepped."""

    def step(
        self, batch: Any, inspect: Inspect | None, apart: Callable[[], AbstractContextManager[Any]]
    ) -> list[Tensor] | None:
        """Take a step; returns the numbers that the training steps returned, None if they took no step and no backward.

        ``inspect`` is called after every ``manual_backward`` with the loss that it was given, before any scaling. Every
        training step runs in an ``apart()`` of its own: after each one, Lightning tells DDP to reduce again.
        """
        stepped: set[int] = set()
        returned: list[Tensor] = []
        grown, news = [0], 0
        with self._backwards(inspect) if inspect is not None else contextlib.nullcontext():
            for number in range(MAX_BATCHES if self.span is None else self.span.batches):
                counted, seen = self._trainer.global_step, len(stepped)
                with apart():
                    returned += _numbers(self._training_step(batch, number, stepped))
                grown.append(grown[-1] + (self._trainer.global_step > counted))
                if len(stepped) > seen:
                    news = number + 1
                if self.span is None and len(stepped) == len(self._trainer.optimizers):
                    break
        if not stepped and all(parameter.grad is None for parameter in self._trainer.lightning_module.parameters()):
            return None
        if self.span is None:
            self.span = Span(batches=max(1, news), steps=max(1, grown[max(1, news)]))
        return returned

    def _training_step(self, batch: Any, number: int, stepped: set[int]) -> dict[str, Any]:
        """One ``training_step`` as the loop runs it; the numbers of the optimizers that step go into ``stepped``."""
        arguments = self._arguments(batch, number)
        self._loop.on_run_start()
        try:
            with contextlib.ExitStack() as hooks:
                for place, optimizer in enumerate(self._trainer.strategy._lightning_optimizers):
                    optimizer._on_after_step = _marking(stepped, place, optimizer._on_after_step)
                    # A step past Lightning counts as well, for instance of self.optimizers(use_pl_optimizer=False).
                    hooks.callback(optimizer.optimizer.register_step_post_hook(_marking(stepped, place)).remove)
                with contextlib.suppress(StopIteration):
                    self._loop.advance(arguments)
        finally:  # after an error too, which Lightning's own loop does not outlive
            outputs = self._loop.on_run_end()
        return outputs

    def _backwards(self, inspect: Inspect) -> AbstractContextManager[Any]:
        strategy = self._trainer.strategy
        backward = strategy.backward

        def seen(loss: Tensor, *arguments: Any, **named: Any) -> Any:
            result = backward(loss, *arguments, **named)
            inspect(loss.detach())
            return result

        return replaced(strategy, "backward", seen)


def _marking(stepped: set[int], place: int, then: Callable[[], Any] | None = None) -> Callable[..., None]:
    def mark(*_: Any) -> None:
        stepped.add(place)
        if then is not None:
            then()

    return mark


def _numbers(outputs: Mapping[str, Any]) -> list[Tensor]:
    """The loss among what a training step returned; without one, every single number that is no integer."""
    found = [outputs["loss"]] if "loss" in outputs else [outputs[name] for name in sorted(outputs, key=str)]
    tensors = [torch.as_tensor(value).detach() for value in found if isinstance(value, float | Tensor)]
    return [tensor.float().cpu() for tensor in tensors if tensor.is_floating_point() and tensor.numel() == 1]
