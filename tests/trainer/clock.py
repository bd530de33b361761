"""A clock for tests that moves when it is told to: how busy the machine is does not matter."""

from __future__ import annotations

import time
from typing import Any

import pytest


class Clock:
    """Stands in for the module ``time``."""

    now = 0.0

    def perf_counter(self) -> float:
        """Seconds that were slept."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass, in no time."""
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        """All other functions are the real ones."""
        return getattr(time, name)


CLOCK = Clock()


def stop_time(patch: pytest.MonkeyPatch) -> None:
    """Let every step, pause and wait take what is slept on ``CLOCK`` meanwhile, and nothing else."""
    patch.setattr("trainer.telemetry.machine_monitor.time", CLOCK)  # compile seconds stay those of the real clock
