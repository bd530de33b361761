"""When steps are audited: after 1, 2, 4 and 8 optimizer steps, then as often as a share of the run's time allows."""

from __future__ import annotations

import math
import time

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

ALWAYS = 8
"""Optimizer steps up to which audits double, whatever they cost."""
SHARE = 0.005
"""Of the run's seconds, at most, that all audits together may take."""


class Schedule:
    """Counts optimizer steps and says which are due; the first process decides for all."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._first = trainer.global_step
        self.steps = 0
        """Optimizer steps begun in this training, the one under way included."""
        self._next = 1.0
        self._began = self._started = 0.0
        self._before = (0, 0.0, 0.0)

    def due(self) -> bool:
        """Count a step that begins; returns whether it is to be audited."""
        self.steps += 1
        if self.steps < self._next:
            return False
        self._started = time.perf_counter()
        self._began = self._began or self._started
        return True

    def stop(self) -> None:
        """No further step is due."""
        self._next = math.inf

    def next(self, spent: float) -> None:
        """An audit is over, all of them have taken ``spent`` seconds; every process calls this."""
        steps, now = self.steps, time.perf_counter()
        last, at, before = self._before
        self._before = steps, now, spent
        if steps < ALWAYS:
            self._next = 2 * steps
            return
        cost, step_seconds = spent - before, max(1e-9, (self._started - at) / max(1, steps - last))
        left, remaining = SHARE * (now - self._began) - spent, self._planned() - steps
        if 0 <= remaining < math.inf:
            left += SHARE * remaining * step_seconds
            # Evenly over what remains, but sooner at first: most of what goes wrong goes wrong early.
            gap = min(steps, remaining * cost / left) if left > cost else math.inf
        else:
            gap = max(steps, (cost - left) / SHARE / step_seconds)
        self._next = self._trainer.strategy.broadcast(steps + max(ALWAYS, gap))

    def _planned(self) -> float:
        """Optimizer steps of this training; infinite where nobody knows."""
        try:
            planned = self._trainer.estimated_stepping_batches
        except MisconfigurationException:  # accumulation changes from epoch to epoch
            return math.inf
        return planned - self._first if planned > 0 else math.inf
