"""Windows: the steps between two points of a curve, with their losses on the way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer.telemetry import memory
from trainer.telemetry.meter import Step
from trainer.telemetry.slow_steps import Allocations


@dataclass(slots=True)
class Window:
    """Steps between two flushes."""

    steps: list[Step]
    losses: torch.Tensor | None
    """Losses of all micro-batches in order, in host memory once ``copied`` has happened."""
    copied: torch.cuda.Event | None
    allocations: Allocations
    """Of the device allocator during these steps."""

    @property
    def arrived(self) -> bool:
        """Whether the losses can be read without waiting."""
        return self.copied is None or self.copied.query()

    def read(self) -> list[float]:
        """Losses of all micro-batches in order. Waits for those that have not arrived."""
        if self.copied is not None:
            self.copied.synchronize()
        return [] if self.losses is None else self.losses.tolist()


class Windows:
    """Windows in order; each one is read while the next one is being filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[Window] = deque()
        self._steps: list[Step] = []
        self._counted = memory.allocator_counts(device)

    def add(self, step: Step) -> None:
        """Add a step that is over."""
        self._steps.append(step)

    def close(self) -> None:
        """End the open window and send its losses to the host."""
        if self._steps:
            before, self._counted = self._counted, memory.allocator_counts(self._device)
            allocations = Allocations(*(now - then for now, then in zip(self._counted, before, strict=True)))
            self._waiting.append(Window(self._steps, *self._sent(), allocations))
            self._steps = []

    def readable(self, *, everything: bool) -> Iterator[Window]:
        """Closed windows, oldest first: those that have arrived and all but the newest, or ``everything``."""
        while self._waiting and (everything or len(self._waiting) > 1 or self._waiting[0].arrived):
            yield self._waiting.popleft()

    def read_now(self) -> tuple[list[Step], list[float]]:
        """The steps that are not read yet, those of the open window too, and their losses; waits for the device."""
        steps = [*(step for window in self._waiting for step in window.steps), *self._steps]
        losses = [loss for step in steps for loss in step.losses]
        return steps, _stacked(losses).tolist() if losses else []

    def _sent(self) -> tuple[torch.Tensor | None, torch.cuda.Event | None]:
        losses = [loss for step in self._steps for loss in step.losses]
        if not losses:
            return None, None
        stacked = _stacked(losses)
        if self._device.type != "cuda":
            return stacked, None
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied


def _stacked(losses: list[torch.Tensor]) -> torch.Tensor:
    """In single precision or better: half of it may be infinite for what double precision holds."""
    stacked = torch.stack(losses)
    return stacked if stacked.dtype == torch.float64 else stacked.float()
