"""What of a ``Loop`` is the same for every loop of one process on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from strategies.loop import Inspect, LogCall, Loop, Restorable, Span

Value = TypeVar("Value")


class OneProcess:
    """Nobody has to be asked; see ``Loop`` for what the members mean."""

    cuda_graphs = False
    manual = False
    span = Span()
    world_size = 1
    is_first_process = True
    capture_warmup_steps = 0
    wrapped: nn.Module | None = None

    def anywhere(self, flag: bool) -> bool:
        return flag

    def everywhere(self, flag: bool) -> bool:
        return flag

    def least(self, value: int) -> int:
        return value

    def broadcast(self, value: Value) -> Value:
        return value

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        return tensor

    def why_not_apart(self) -> str | None:
        return None

    why_not_capture_together = why_not_apart

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    unlogged = apart = quiet

    def step(self, batch: Any, inspect: Inspect | None = None) -> Tensor:
        loop = cast(Loop, self)
        loss = loop.train(batch, inspect)
        loop.optimize()
        return loss

    def snapshot(self, batch: Any, *, weights: bool = True) -> Restorable:
        from trainer.guards.snapshot import Snapshot

        return Snapshot(cast(Loop, self), batch, weights=weights)

    def unreadable(self) -> Mapping[type, str]:
        return {}

    def recording_logs(self) -> contextlib.AbstractContextManager[list[tuple[LogCall, Any]]]:
        return contextlib.nullcontext([])

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        """Nothing was kept."""


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode, and no gradients are taken."""
    flags = [(one, one.training) for one in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for one, training in flags:
            one.training = training
