"""Processes: what those of one Lightning training agree on, and how their gradients meet.

DDP and graphs: https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar, cast

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.loops.agreement import largest

Value = TypeVar("Value")

DDP_WARMUP_STEPS = 11
"""Steps with a reduction after which DDP neither rebuilds its buckets nor times itself, as torch's notes have it."""


class Processes:
    """The part of ``Loop`` that concerns several processes; see there for what the members mean."""

    _trainer: L.Trainer

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    @property
    def is_first_process(self) -> bool:
        return self._trainer.is_global_zero

    def anywhere(self, flag: bool) -> bool:
        return bool(largest(flag, self.world_size))

    def everywhere(self, flag: bool) -> bool:
        return not self.anywhere(not flag)

    def least(self, value: int) -> int:
        return -largest(-value, self.world_size)

    def broadcast(self, value: Value) -> Value:
        return self._trainer.strategy.broadcast(value)

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        strategy = self._trainer.strategy
        return cast(Tensor, strategy.reduce(tensor.to(strategy.root_device), reduce_op=how))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        strategy = self._trainer.strategy
        model = strategy.model
        if not isinstance(strategy, DDPStrategy) or not isinstance(model, DistributedDataParallel):
            yield
            return
        try:
            with strategy.block_backward_sync():
                yield
        finally:
            if model.find_unused_parameters:
                # It continues to count what is used here as used, to be reduced with the gradients to come. Of two
                # networks trained by turns, the other one then has none: "gradient which is undefined".
                model.reducer._reset_state()

    def why_not_capture_together(self) -> str | None:
        strategy = self._trainer.strategy
        if isinstance(strategy, SingleDeviceStrategy):
            return None
        if isinstance(strategy, ModelParallelStrategy):
            if self._trainer.accumulate_grad_batches == 1:
                return None
            return "under fsdp2 no graph holds gradients that are accumulated: trainer.accumulate_grad_batches=1"
        model = strategy.model
        if not isinstance(strategy, DDPStrategy) or not isinstance(model, DistributedDataParallel):
            return f"no graph holds the steps of {type(strategy).__name__}; under ddp and fsdp2 it does"
        if model.find_unused_parameters:
            return "DDP with find_unused_parameters asks the device in every step which parameters were used"
        if model.static_graph:
            return "DDP with static_graph=True is not compared with eager, so that nothing would check its graphs"
        return None

    @property
    def capture_warmup_steps(self) -> int:
        return DDP_WARMUP_STEPS if isinstance(self._trainer.strategy, DDPStrategy) else 0
