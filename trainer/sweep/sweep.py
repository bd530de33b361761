"""Sweep: the state of a running sweep: which cells are left to do, and what became of the others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from trainer.report.sweep import Cell
from trainer.sweep.cell_process import CellEnd, CellProcess, goes_on
from trainer.sweep.code_version import code_version, difference
from trainer.sweep.ledger import Ledger
from trainer.sweep.options import SweepOptions
from trainer.sweep.orphans import host, wait_for
from trainer.sweep.plan import PlannedCell
from trainer.sweep.view import SweepView
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
        """Whether a cell had finished before."""
        return cell.number in self._done

    def wants(self, cell: PlannedCell) -> bool:
        """Whether a cell is to be run now; a warm one whose cold twin failed is not, and fails."""
        if self.is_done(cell):
            return False
        if cell.start != "warm":
            return True
        twin = self._ends.get(self._twin(cell).number)
        if twin is not None and twin.exit_code == 0:
            return True
        record = cell.described
        record.status, record.command = "failed", list(cell.overrides)
        record.reason = f"not run: its cold twin {twin.outcome if twin is not None else 'did not run'}"
        record.save(cell.directory)
        self.ended(cell, CellEnd(exit_code=1, record=record, seconds=0.0))
        return False

    def process_of(self, cell: PlannedCell, *, variables: dict[str, str], to_file: bool) -> CellProcess:
        """The process that will run a cell."""
        return CellProcess(
            cell=cell,
            timeout_seconds=self._options.timeout_seconds,
            grace_seconds=self._options.grace_seconds,
            to_file=to_file,
            variables=variables,
        )

    def starts(self, cell: PlannedCell) -> None:
        """Note that a cell is about to run."""
        self.note(cell, state="running", host=host(), code=self._code, exit_code=None, reason=None)
        self.view.started(cell)

    def note(self, cell: PlannedCell, **changes: object) -> None:
        """Write down what is new about a cell."""
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
            job_id=None,
        )
        result = self._ends[cell.number] = _result(cell, end.exit_code, end.record)
        self.view.ended(cell, result, end.seconds)
        if cell.caches is not None and not self._options.keep_caches:
            ends = [self._ends.get(each.number) for each in self.cells if each.pair == cell.pair]
            if len(ends) == 1 or all(each is not None and each.exit_code == 0 for each in ends):
                shutil.rmtree(cell.caches, ignore_errors=True)

    def close(self, *, stopped: bool) -> None:
        """Write how the sweep ended."""
        failed = any(result.exit_code != 0 for result in self.results)
        self._ledger.state = "stopped" if stopped else "failed" if failed else "finished"
        self._ledger.save()

    def _look_back(self) -> None:
        """Find the cells that are finished and need not run again; say why others do."""
        for cell in self.cells:
            entry = self._ledger.entries[cell.key]
            if entry.state == "running":
                wait_for(entry, self.view.say)
            record = _finished(cell)
            changed = difference(entry.code, self._code)
            if changed and record is None and goes_on(cell):
                self.view.say(f"goes on from a checkpoint of other code: {cell.title} ({changed})")
            if record is None or entry.state == "planned":
                continue
            if changed:
                self.view.say(f"runs again, because the code has changed since: {cell.title} ({changed})")
                continue
            self._done.add(cell.number)
            self._ends[cell.number] = _result(cell, 0, record)
        self._repeat_cold_twins()
        for cell in self.cells:
            if cell.number in self._done:
                self.note(cell, state="finished", exit_code=0, reason=None, pid=None, job_id=None)
        self.view.skipped(self._ends)

    def _repeat_cold_twins(self) -> None:
        """A warm cell that has to run needs the caches of its cold twin; where they are gone the twin runs again."""
        for cell in self.cells:
            if cell.start == "warm" and cell.number not in self._done and not (cell.caches and cell.caches.is_dir()):
                twin = self._twin(cell)
                if twin.number in self._done:
                    self._done.discard(twin.number)
                    del self._ends[twin.number]
                    self.view.say(f"runs again, because {cell.title} needs its compile caches: {twin.title}")

    def _twin(self, cell: PlannedCell) -> PlannedCell:
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
