"""Cells that end at once and start no process, for tests of what a sweep does around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hydra.plugins.sweeper import Sweeper

from trainer.sweep import launcher
from trainer.sweep.plan import PlannedCell

SPEEDS = {"eager": 1.0, "regional": 2.0, "cached": 2.0, "whole": 4.0}
"""Steps per second by label."""


class InstantCells:
    """Stands in for ``run_cell``; lists what ran and can be given what fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[PlannedCell] = []
        self.fails: Callable[[PlannedCell], bool] = lambda cell: False
        monkeypatch.setattr(launcher, "run_cell", self._run)
        # Hydra composes each cell once to see whether it can be; the launcher does so again.
        monkeypatch.setattr(Sweeper, "validate_batch_is_legal", lambda self, batch: None)

    @property
    def titles(self) -> list[str]:
        return [cell.title for cell in self.ran]

    def _run(self, cell: PlannedCell, signals: Sequence[int]) -> None:
        self.ran.append(cell)
        if cell.caches is not None:
            cell.caches.mkdir(parents=True, exist_ok=True)
        record, failed = cell.record, self.fails(cell)
        record.status, record.reason = ("failed", "RuntimeError: no") if failed else ("finished", None)
        record.steady_steps_per_second = speed = SPEEDS[record.label]
        record.final_loss, record.useful_tokens_per_second = 1.0 / speed, 100.0 * speed
        record.warmup_seconds, record.warmup_steps, record.steps = 10.0 * speed, 5, 105
        record.save(cell.directory)
        cell.exit_code = int(failed)
