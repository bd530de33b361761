"""Marks that the hot path leaves on a step, for a microsecond each: garbage collection and shapes never seen before."""

from __future__ import annotations

import gc
import time
from typing import Any

MOST_SHAPES = 10_000
"""Shapes remembered; a run with more has no shape that is worth telling."""
FEW_SHAPES, MOST_NEW = 16, 4
"""Shapes, and new ones for each batch of one that was seen, from which on a new shape is the rule."""
MOST_TENSORS = 8
"""Tensors of a batch that are looked at."""


class CollectorWatch:
    """Seconds in Python's garbage collector, which stops every thread."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def start(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Stop watching."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began


class SeenShapes:
    """Tells batches of a new shape from those whose like has been."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._again = 0

    def new(self, batch: Any) -> Any:
        """The shapes of ``batch`` when they are new, else None."""
        shape = shape_of(batch)
        if shape in self._seen or len(self._seen) >= MOST_SHAPES:
            self._again += 1
            return None
        self._seen.add(shape)
        return shape

    @property
    def settle(self) -> bool:
        """Whether shapes come again, so that one that is new costs once what a steady step does not; false for
        the very first, which the warm-up leaves out, and where most batches have a shape of their own."""
        return 1 < len(self._seen) <= FEW_SHAPES + MOST_NEW * self._again


def shape_of(batch: Any) -> tuple[Any, ...]:
    """Shapes of the first tensors of a batch: a tensor, or a sequence, mapping or object of tensors."""
    if not isinstance(batch, (tuple, list)):
        if hasattr(batch, "shape"):
            return (batch.shape,)
        batch = list(batch.values() if hasattr(batch, "values") else getattr(batch, "__dict__", {}).values())
    # Not by isinstance: of anything but a tensor, torch's own check for its class takes most of a microsecond.
    shapes = [getattr(part, "shape", None) for part in batch[:MOST_TENSORS]]
    return tuple([shape for shape in shapes if shape is not None])
