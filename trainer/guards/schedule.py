"""Schedule of audits: after 1, 2, 4 and 8 optimizer steps, then as often as a share of the run's time allows."""

from __future__ import annotations

import math
import time
from typing import Any

from strategies.loop import Loop
from trainer.guards.preflight import shapes_of

ALWAYS = 8
"""Optimizer steps up to which audits double, whatever they cost."""
SHAPES, SHAPES_WITHIN = 8, 64
"""Shapes of batch whose first step is audited too, and the optimizer steps within which they are looked for."""
SHARE = 0.005
"""Of the run's seconds, at most, that all audits together may take."""


class Schedule:
    """Counts optimizer steps and says which are due; the first process decides for all."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._first = loop.steps_done
        self.steps = 0
        """Optimizer steps begun in this training, the one under way included."""
        self._next = 1.0
        self._began = self._started = 0.0
        self._before = (0, 0.0, 0.0)
        self._shapes: set[str] = set()

    def due(self, batch: Any, *, later: bool = False) -> bool:
        """Count a step on ``batch`` that begins; returns whether it is to be audited, which ``later`` puts off."""
        self.steps += 1
        if later:
            return False
        new = self._is_new(batch)
        if self.steps < self._next and not new:
            return False
        self._started = time.perf_counter()
        self._began = self._began or self._started
        return True

    def _is_new(self, batch: Any) -> bool:
        """Whether the batch is the first of its shape, on one device: several may be given different shapes."""
        if self.steps > SHAPES_WITHIN or len(self._shapes) >= SHAPES or self._loop.world_size > 1:
            return False
        before = len(self._shapes)
        self._shapes.add(shapes_of(batch))
        return len(self._shapes) > max(1, before)

    def stop(self) -> None:
        """No further step is due."""
        self._next, self._shapes = math.inf, {str(number) for number in range(SHAPES)}

    def next(self, spent: float) -> None:
        """An audit is over, all of them have taken ``spent`` seconds; every process calls this."""
        steps, now = self.steps, time.perf_counter()
        last, at, before = self._before
        self._before = steps, now, spent
        if steps < ALWAYS:
            self._next = 1 << steps.bit_length()
            return
        cost, step_seconds = spent - before, max(1e-9, (self._started - at) / max(1, steps - last))
        left, planned = SHARE * (now - self._began) - spent, self._loop.steps_planned
        remaining = -1 if planned is None else planned - self._first - steps
        if remaining >= 0:
            left += SHARE * remaining * step_seconds
            # Evenly over what remains, but sooner at first: most of what goes wrong goes wrong early.
            gap = min(steps, remaining * cost / left) if left > cost else math.inf
        else:
            gap = max(steps, (cost - left) / SHARE / step_seconds)
        self._next = self._loop.broadcast(steps + max(ALWAYS, gap))
