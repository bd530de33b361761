"""Pool: runs the lanes of a sweep on this machine, one cell after the other or several at once."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from trainer.process import present_handlers
from trainer.sweep.cell_process import CellProcess
from trainer.sweep.plan import PlannedCell
from trainer.sweep.sweep import Sweep

POLL_SECONDS = 0.05


@dataclass(kw_only=True, slots=True)
class Signals:
    """Signals that arrived while the sweep ran; the running cells decide how they end, and no other one starts."""

    received: int | None = None
    pass_on: Callable[[int], None] = lambda number: None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal and pass it on."""
        self.received = number
        self.pass_on(number)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Handle the signals that stop a run, and put the former handlers back."""
        before = {number: signal.signal(number, self.handle) for number in present_handlers()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(kw_only=True, slots=True)
class _Worker:
    """One of the places where cells run at once."""

    variables: dict[str, str]
    lane: list[PlannedCell] = field(default_factory=list)
    process: CellProcess | None = None


def run_lanes(
    lanes: Sequence[Sequence[PlannedCell]],
    sweep: Sweep,
    signals: Signals,
    *,
    places: Sequence[dict[str, str]],
    to_file: bool,
) -> None:
    """Run every cell; each lane stays in one place, from its first cell to its last.

    Args:
        lanes: Cells that must run one after the other, see ``plan.lanes``.
        sweep: Says what is left to do, and is told what became of it.
        signals: A signal ends the running cells, and the sweep with them.
        places: Environment variables for each of the cells that run at once.
        to_file: Whether output goes to a file in the cell's directory instead of to the terminal.
    """
    waiting = [list(lane) for lane in lanes]
    workers = [_Worker(variables=variables) for variables in places]

    def pass_on(number: int) -> None:
        for worker in workers:
            if worker.process is not None:
                worker.process.send(number)

    signals.pass_on = pass_on
    try:
        while True:
            for worker in workers:
                _advance(worker, waiting, sweep, signals, to_file=to_file)
            running = [worker.process for worker in workers if worker.process is not None]
            if not running:
                return
            sweep.view.show({process.cell.number: process.last_line for process in running}, signals.received)
            time.sleep(POLL_SECONDS)
    finally:
        for worker in workers:  # an error of ours: nothing may stay behind
            if worker.process is not None:
                worker.process.send(signal.SIGTERM)


def _advance(
    worker: _Worker, waiting: list[list[PlannedCell]], sweep: Sweep, signals: Signals, *, to_file: bool
) -> None:
    """See whether the worker's cell has ended, and start its next one."""
    if worker.process is not None:
        end = worker.process.poll()
        if end is None:
            return
        sweep.ended(worker.process.cell, end)
        worker.process = None
    while signals.received is None and (worker.lane or waiting):
        if not worker.lane:
            worker.lane = waiting.pop(0)
        cell = worker.lane.pop(0)
        if not sweep.wants(cell):
            continue
        process = sweep.process_of(cell, variables=worker.variables, to_file=to_file)
        sweep.starts(cell)
        pid = process.start()
        worker.process = process
        if signals.received is not None:  # it came between our looking and the start
            process.send(signals.received)
        sweep.note(cell, pid=pid)
        return
