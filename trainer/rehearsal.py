"""Rehearsal: passes on the first batch, before the first step, that leave no trace in the training."""

from __future__ import annotations

from typing import Any

import lightning as L

from strategies import Program
from trainer.telemetry.record import RunRecord


class Rehearsal:
    """Runs once, with the first batch on the device."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def wanted(self, program: Program) -> bool:
        """Whether there is anything to rehearse."""
        return False

    def run(self, trainer: L.Trainer, program: Program, batch: Any) -> None:
        """Rehearse on ``batch`` and restore everything."""
