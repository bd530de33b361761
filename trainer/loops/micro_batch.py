"""One micro-batch of Lightning's automatic optimization, behind ``strategies.loop.MicroBatch``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import lightning as L
import torch


class LightningMicroBatch:
    """One call of ``_AutomaticOptimization.run``; see ``MicroBatch``."""

    def __init__(
        self,
        trainer: L.Trainer,
        optimizer: torch.optim.Optimizer,
        index: int,
        arguments: OrderedDict[str, Any],
        original: Callable[..., Any],
    ) -> None:
        self._trainer, self._optimizer, self._arguments, self._original = trainer, optimizer, arguments, original
        self._automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        self._progress: Any = None
        self.batch, self.index = arguments["batch"], index
        self.arguments: Mapping[str, Any] = arguments
        self.begins = index % trainer.accumulate_grad_batches == 0
        self.ends = not trainer.fit_loop._should_accumulate()

    def run(self, batch: Any) -> dict[str, Any]:
        return cast(dict[str, Any], self._original(self._optimizer, self.index, self._given(batch)))

    def forward_backward(self, batch: Any) -> dict[str, Any]:
        closure = self._automatic._make_closure(self._given(batch), self._optimizer, self.index)
        closure()
        return closure.consume_result().asdict()

    def forward(self, batch: Any, index: Any) -> None:
        given = {**self._arguments, "batch": batch}
        if "batch_idx" in given:
            given["batch_idx"] = index
        self._trainer.strategy.training_step(*given.values())

    def optimize(self, outputs: Mapping[str, Any]) -> None:
        self._automatic._optimizer_step(self.index, lambda: outputs["loss"])

    def count(self, *, whole: bool) -> None:
        progress = self._automatic.optim_progress.optimizer
        if self.begins:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if whole:
            progress.step.increment_ready()
            progress.step.increment_completed()

    def uncount(self) -> None:
        if self._progress is not None:
            self._automatic.optim_progress.optimizer = self._progress

    def _given(self, batch: Any) -> OrderedDict[str, Any]:
        if batch is self.batch:
            return self._arguments
        self._progress = copy.deepcopy(self._automatic.optim_progress.optimizer)
        return type(self._arguments)({**self._arguments, "batch": batch})
