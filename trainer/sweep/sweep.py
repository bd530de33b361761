"""Sweep: the state of a running sweep: which cells are left to do, and what became of the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from rich.console import Console

from trainer.report.sweep import Cell
from trainer.sweep.environment import code_version
from trainer.sweep.plan import Ledger, PlannedCell, SweepOptions
from trainer.sweep.processes import CellEnd, CellProcess, goes_on, host, wait_for
from trainer.telemetry.record import RunRecord


class Sweep:
    """Cells of one launch and the ledger that they are written to.

    Args:
        cells: In the order in which they run, with number and directory.
        ledger: What was done before; every cell of ``cells`` is entered.
        options: Of the launcher.
        view: Where progress is shown.
    """

    def __init__(self, cells: Sequence[PlannedCell], ledger: Ledger, options: SweepOptions, view: SweepView) -> None:
        self.cells, self.view = list(cells), view
        self._ledger, self._options = ledger, options
        self._code = code_version()
        self._ends: dict[int, Cell] = {}
        self._done: set[int] = set()
        self._look_back()

    @property
    def results(self) -> list[Cell]:
        """Cells that ended, now or before, in order."""
        return [self._ends[cell.number] for cell in self.cells if cell.number in self._ends]

    def result_of(self, cell: PlannedCell) -> Cell | None:
        """How a cell ended; None when it did not run."""
        return self._ends.get(cell.number)

    def is_done(self, cell: PlannedCell) -> bool:
        return cell.number in self._done

    def wants(self, cell: PlannedCell) -> bool:
        """Whether a cell is to be run now; a warm one whose cold one failed is not, and fails."""
        if self.is_done(cell):
            return False
        if cell.start != "warm":
            return True
        cold = self._ends.get(self._cold(cell).number)
        if cold is not None and cold.exit_code == 0:
            return True
        record = cell.described
        record.status, record.command = "failed", list(cell.overrides)
        record.reason = f"not run: its cold cell {cold.outcome if cold is not None else 'did not run'}"
        record.save(cell.directory)
        self.ended(cell, CellEnd(exit_code=1, record=record, seconds=0.0))
        return False

    def process_of(self, cell: PlannedCell, *, variables: dict[str, str]) -> CellProcess:
        return CellProcess(cell=cell, timeout_seconds=self._options.timeout_seconds, variables=variables)

    def starts(self, cell: PlannedCell) -> None:
        self.note(cell, state="running", host=host(), code=self._code, exit_code=None, reason=None)
        self.view.started(cell)

    def note(self, cell: PlannedCell, **changes: object) -> None:
        self._ledger.note(cell, **changes)

    def ended(self, cell: PlannedCell, end: CellEnd) -> None:
        """Note how a cell ended, and remove caches that nobody needs any more."""
        state = "finished" if end.exit_code == 0 else end.record.status
        self.note(
            cell,
            state=state,
            exit_code=end.exit_code,
            reason=end.record.reason,
            seconds=round(end.seconds, 3),
            pid=None,
        )
        result = self._ends[cell.number] = _result(cell, end.exit_code, end.record)
        self.view.ended(cell, result, end.seconds)
        if cell.caches is not None:
            ends = [self._ends.get(each.number) for each in self.cells if each.pair == cell.pair]
            if len(ends) == 1 or all(each is not None and each.exit_code == 0 for each in ends):
                shutil.rmtree(cell.caches, ignore_errors=True)

    def close(self, *, stopped: bool) -> None:
        failed = any(result.exit_code != 0 for result in self.results)
        self._ledger.state = "stopped" if stopped else "failed" if failed else "finished"
        self._ledger.save()

    def _look_back(self) -> None:
        """Find the cells that are finished and need not run again; say why others do."""
        for cell in self.cells:
            entry = self._ledger.entries[cell.key]
            if entry.state == "running":
                wait_for(entry, self.view.print)
            record = _finished(cell)
            changed = entry.code != self._code
            versions = f"{cell.title} ({entry.code}; now {self._code})"
            if changed and record is None and goes_on(cell):
                self.view.print(f"continues from a checkpoint of other code: {versions}")
            if record is None or entry.state == "planned":
                continue
            if changed:
                self.view.print(f"runs again, because the code has changed since: {versions}")
                continue
            self._done.add(cell.number)
            self._ends[cell.number] = _result(cell, 0, record)
        self._repeat_cold()
        for cell in self.cells:
            if cell.number in self._done:
                self.note(cell, state="finished", exit_code=0, reason=None, pid=None)
        self.view.skipped(self._ends)

    def _repeat_cold(self) -> None:
        """A warm cell that has to run needs the caches of the cold one; where they are gone that one runs again."""
        for cell in self.cells:
            if cell.start == "warm" and cell.number not in self._done and not (cell.caches and cell.caches.is_dir()):
                cold = self._cold(cell)
                if cold.number in self._done:
                    self._done.discard(cold.number)
                    del self._ends[cold.number]
                    self.view.print(f"runs again, because {cell.title} needs its compile caches: {cold.title}")

    def _cold(self, cell: PlannedCell) -> PlannedCell:
        return next(each for each in self.cells if each.pair == cell.pair and each.start == "cold")


def _finished(cell: PlannedCell) -> RunRecord | None:
    """The record of a cell that finished."""
    try:
        record = RunRecord.load(cell.directory)
    except ValueError:
        return None
    return record if record.status == "finished" else None


def _result(cell: PlannedCell, exit_code: int, record: RunRecord) -> Cell:
    return Cell(overrides=cell.chosen, directory=cell.directory, exit_code=exit_code, record=record)


class SweepView:
    """Progress over all cells of a sweep.

    Args:
        cells: All that are planned.
    """

    def __init__(self, cells: Sequence[PlannedCell]) -> None:
        self._console = Console(highlight=False)
        self._cells = {cell.number: cell for cell in cells}
        self._over: dict[int, Cell] = {}

    def print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def skipped(self, results: Mapping[int, Cell]) -> None:
        """Cells that had finished before, by number."""
        self._over.update(results)
        if results:
            self.print(f"finished before, not run again: {len(results)} of {len(self._cells)} cells")
            for result in results.values():
                self.print(f"  {' '.join(result.overrides) or 'one cell'}")

    def started(self, cell: PlannedCell) -> None:
        self.print(f"{self._place(cell)} {cell.title} -> {cell.directory}")

    def ended(self, cell: PlannedCell, result: Cell, seconds: float) -> None:
        """A cell has ended: its figures, or why it has none."""
        self._over[cell.number] = result
        parts = [result.outcome, *_figures(result.record), _span(seconds)]
        if result.exit_code != 0 and result.record is not None and result.record.reason:
            parts.append(result.record.reason.splitlines()[0])
        self.print(f"{self._place(cell)} {cell.title}: {' · '.join(parts)} ({len(self._cells) - len(self._over)} left)")

    def _place(self, cell: PlannedCell) -> str:
        return f"[{list(self._cells).index(cell.number) + 1}/{len(self._cells)}]"


def _figures(record: RunRecord | None) -> list[str]:
    if record is None or not record.steady_steps_per_second:
        return []
    return [f"{record.steady_steps_per_second:.2f} {'batches' if record.run == 'inference' else 'steps'}/s"]


def _span(seconds: float) -> str:
    """A time for people: ``42 s``, ``3:05 min``, ``1:02:00 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
