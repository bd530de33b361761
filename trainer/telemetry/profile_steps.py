"""When a training is profiled: a few whole steps, once some steady ones have gone before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.telemetry.meter import Step
from trainer.telemetry.profile import Profile

QUIET_STEPS = 3
"""Steady steps in a row before the recording."""


class ProfiledSteps:
    """Decides, after each step, whether the recording begins or ends. What breaks in it never breaks the training."""

    def __init__(self, steps: int, device: torch.device, directory: Path | None) -> None:
        self._wanted, self._done, self._quiet, self._first = steps, 0, 0, 0
        self.recording = False
        self.facts: dict[str, Any] = {}
        """For the record, once the recording has ended."""
        self._over = False
        self._profile: Profile | None = None
        try:
            self._profile = Profile(device, directory)
        except Exception as error:  # the tracing library's own
            self._give_up(error)

    @property
    def full(self) -> bool:
        """Whether all steps are recorded, and ``stop`` is due."""
        return self.recording and self._done >= self._wanted

    def due(self, step: Step, *, warm: bool) -> bool:
        """Count ``step``, which is over; returns whether ``start`` is due."""
        if self._over:
            return False
        if self.recording:
            step.profiled = True
            self._first = self._first or step.number
            self.count()
            return False
        self._quiet = self._quiet + 1 if warm and not step.compiled else 0
        return self._quiet >= QUIET_STEPS

    def count(self) -> None:
        """One more step is recorded."""
        self._done += 1

    def start(self) -> None:
        """Begin to record, between two steps."""
        if self._profile is None:  # it has failed
            return
        try:
            self._profile.start()
            self.recording = True
        except Exception as error:  # the tracing library's own
            self._give_up(error)

    def stop(self) -> None:
        """End the recording, between two steps; without a whole step in it, it is begun again later."""
        if self._profile is None or not self.recording:
            return
        self.recording = False
        try:
            facts = self._profile.stop(self._done)
        except Exception as error:  # the tracing library's own
            self._give_up(error)
            return
        if facts:
            self.facts = {"first_step": self._first or None, **facts}
            self._close()
        self._quiet = 0

    def finish(self) -> None:
        """Training is over: say why there is no profile, if there is none."""
        if not self.facts:
            self.facts = {"reason": f"the run ended before {QUIET_STEPS} steady steps and a profiled one"}
        self._close()

    def _give_up(self, error: Exception) -> None:
        self.facts = {"reason": f"the profiler failed: {type(error).__name__}: {error}".splitlines()[0]}
        self._close()

    def _close(self) -> None:
        self._over = True
        if self._profile is not None:
            self._profile.close()
            self._profile = None


def profile_calls(call: Callable[[], None], times: int, device: torch.device, directory: Path | None) -> dict[str, Any]:
    """Record ``times`` calls; returns the facts for the record."""
    profiled = ProfiledSteps(times, device, directory)
    profiled.start()
    try:
        for _ in range(times):
            call()
            profiled.count()
    finally:
        profiled.stop()
        profiled.finish()
    return profiled.facts
