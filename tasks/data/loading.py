"""What every source of data is told about loading: the batch's size and the worker processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tasks.checks import require_at_least


@dataclass(kw_only=True, slots=True)
class Loading:
    """Base of every source of data."""

    batch_size: int = 16
    """Examples a batch on each device."""
    num_workers: int | None = None
    """Loader processes a device; None: one less than this process' cores, at most 8."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        require_at_least("task.data.batch_size", self.batch_size, 1)
        require_at_least("task.data.num_workers", self.num_workers, 0)

    def workers(self) -> int:
        """Loader processes to start."""
        if self.num_workers is not None:
            return self.num_workers
        return min(
            8, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) - 1
        )
