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
from trainer.sweep.environment import code_version
from trainer.sweep.plan import Ledger, PlannedCell
from trainer.sweep.processes import goes_on, loaded, run_cell
from trainer.telemetry.record import RunRecord


class Sweep:
    """Cells of one launch and the ledger that they are written to. Finds those that finished before, and says so.

    Args:
        directory: The sweep's.
        cells: In the order in which they run, each with its entry in ``ledger``, its directory and its command.
        ledger: What was done before.
    """

    def __init__(self, directory: Path, cells: Sequence[PlannedCell], ledger: Ledger, console: Console) -> None:
        self._directory, self._cells, self._ledger = directory, list(cells), ledger
        self._console = console
        self._code = code_version()
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
            cell.entry.code = self._code
            self._ledger.save(self._directory)
            self._print(cell, f"-> {cell.directory}")
            began = time.monotonic()
            run_cell(cell, signals)
            self._end(cell, time.monotonic() - began)

    def _wants(self, cell: PlannedCell) -> bool:
        """Whether a cell is to be run now; a warm one whose cold one failed is not, and fails."""
        if cell.exit_code is not None:
            return False
        if cell.entry.start != "warm" or (cold := self._cold(cell)).exit_code == 0:
            return True
        record, cell.exit_code = cell.record, 1
        record.status, record.command = "failed", list(cell.entry.overrides)
        record.reason = f"not run: its cold cell {cold.record.status}"
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
        for entry in self._ledger.cells:
            if all(entry is not cell.entry for cell in self._cells):
                self._say(f"left alone, not part of this command: {entry.directory}")
        finished: dict[int, RunRecord] = {}
        for cell in self._cells:
            entry = cell.entry
            record = loaded(cell.directory)
            versions = f"{cell.title} ({entry.code}; now {self._code})"
            if record is not None and record.status == "finished" and entry.code:  # else of another run in its folder
                if entry.code == self._code:
                    finished[entry.number] = record
                else:
                    self._say(f"runs again, because the code has changed since: {versions}")
            elif entry.code != self._code and goes_on(cell.directory):
                self._say(f"continues from a checkpoint of other code: {versions}")
        for cell in self._cells:
            if cell.entry.start == "warm" and cell.entry.number not in finished:
                cold = self._cold(cell)
                if finished.pop(cold.entry.number, None) is not None:
                    self._say(f"runs again, because {cell.title} needs its compile caches: {cold.title}")
        for cell in self._cells:
            if (record := finished.get(cell.entry.number)) is not None:
                cell.record, cell.exit_code = record, 0
        if finished:
            self._say(f"finished before, not run again: {len(finished)} of {len(self._cells)} cells")
            for cell in self.ended:
                self._say(f"  {cell.title}")

    def _cold(self, cell: PlannedCell) -> PlannedCell:
        return next(each for each in self._cells if each.pair == cell.pair and each.entry.start == "cold")

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
