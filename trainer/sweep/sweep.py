"""Sweep: runs what is left of its cells, one after the other, keeps what became of each, and compares them."""

from __future__ import annotations

import io
import shlex
import shutil
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from trainer.report import tables
from trainer.report.comparison import compare_runs
from trainer.report.runs import Run
from trainer.sweep.plan import PlannedCell
from trainer.sweep.processes import loaded, run_cell


class Sweep:
    """Runs cells in their order. Finds those that finished before, and says so."""

    def __init__(self, cells: Sequence[PlannedCell], console: Console) -> None:
        self._cells, self._console = list(cells), console
        self._look_back()

    @property
    def ended(self) -> list[PlannedCell]:
        """Cells that ended, now or before, in order."""
        return [cell for cell in self._cells if cell.exit_code is not None]

    def run(self, signals: Sequence[int]) -> None:
        """Run what is left; with the first of ``signals``, a list that grows, no further cell starts."""
        for cell in self._cells:
            if signals:
                return
            if not self._wants(cell):
                continue
            self._print(cell, f"-> {cell.directory}")
            began = time.monotonic()
            run_cell(cell, signals)
            self._end(cell, time.monotonic() - began)

    def _wants(self, cell: PlannedCell) -> bool:
        """Whether a cell is to be run now; a warm one whose cold one failed is not, and fails."""
        if cell.exit_code is not None:
            return False
        if cell.start != "warm" or (cold := self._cold(cell)).exit_code == 0:
            return True
        record, cell.exit_code = cell.record, 1
        record.status, record.reason = "failed", f"not run: its cold cell {cold.record.status}"
        record.save(cell.directory)
        self._end(cell, 0.0)
        return False

    def _end(self, cell: PlannedCell, seconds: float) -> None:
        """Print how a cell ended, and remove caches that nobody needs any more."""
        record = cell.record
        parts = [record.status]
        if record.steady_steps_per_second:
            parts.append(f"{record.steady_steps_per_second:.2f} steps/s")
        parts.append(str(timedelta(seconds=round(seconds))))
        if cell.exit_code != 0 and record.reason:
            parts.append(record.reason.splitlines()[0])
        self._print(cell, f": {' · '.join(parts)} ({len(self._cells) - len(self.ended)} left)")
        last = [each for each in self._cells if each.pair == cell.pair][-1]
        if cell is last and cell.caches is not None:
            shutil.rmtree(cell.caches, ignore_errors=True)

    def _look_back(self) -> None:
        """Find the cells that are finished and need not run again; say why others do."""
        records = {place: loaded(cell.directory) for place, cell in enumerate(self._cells)}
        finished = {place: one for place, one in records.items() if one is not None and one.status == "finished"}
        for place, cell in enumerate(self._cells):
            if cell.start == "warm" and place not in finished:
                cold = self._cold(cell)
                if finished.pop(self._cells.index(cold), None) is not None:
                    self._say(f"runs again, because {cell.title} needs its compile caches: {cold.title}")
        for place, record in finished.items():
            self._cells[place].record, self._cells[place].exit_code = record, 0
        if finished:
            self._say(f"finished before, not run again: {len(finished)} of {len(self._cells)} cells")
            for cell in self.ended:
                self._say(f"  {cell.title}")

    def _cold(self, cell: PlannedCell) -> PlannedCell:
        return next(each for each in self._cells if each.pair == cell.pair and each.start == "cold")

    def _print(self, cell: PlannedCell, text: str) -> None:
        blank = "" if text.startswith(":") else " "
        self._say(f"[{self._cells.index(cell) + 1}/{len(self._cells)}] {cell.title}{blank}{text}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def summarize(runs: Sequence[Run], *, planned: int, sweep_dir: Path, width: int) -> str:
    """The comparison of a sweep's runs as text, which has the reasons of those that did not finish, and how to see
    more."""
    out = io.StringIO()
    if runs:
        tables.show(compare_runs(runs), Console(file=out, width=width, highlight=False, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if len(runs) < planned:
        lines.append(f"stopped after {len(runs)} of {planned} cells")
    folder = shlex.quote(str(sweep_dir))
    return "\n".join([*lines, f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"])
