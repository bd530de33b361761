"""View: what a person sees of a sweep: a line for each cell that ends, and what is running, done and left.

On a terminal the lower lines are live; in a file or a CI log there is a line a minute instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainer.report.sweep import Cell
from trainer.report.tables import NOT_SURE
from trainer.sweep.plan import PlannedCell
from trainer.telemetry.record import RunRecord

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 60.0
"""Between two lines where nothing live can be drawn."""


class SweepView:
    """Progress over all cells of a sweep.

    Args:
        cells: All that are planned.
        parallel: How many of them run at once.
        live: Whether lower lines are drawn; None = on a terminal.
        before, total: Cells that were launched before these, and that will have been in the end, where a sweeper
            launches a few at a time.
    """

    def __init__(
        self,
        cells: Sequence[PlannedCell],
        *,
        parallel: int,
        live: bool | None = None,
        before: int = 0,
        total: int | None = None,
    ) -> None:
        self._console = Console(highlight=False)
        self._cells, self._parallel = {cell.number: cell for cell in cells}, parallel
        self._before, self._total = before, total or len(self._cells)
        self._began = time.monotonic()
        self._started: dict[int, float] = {}
        self._over: dict[int, Cell] = {}
        self._seconds: list[tuple[PlannedCell, float]] = []
        self._drawn = self._began
        self._wide = live if live is not None else self._console.is_terminal
        self._live: Live | None = None

    def close(self) -> None:
        """Take the live lines away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print a line above the live ones."""
        self._console.print(line, markup=False, soft_wrap=True)

    def skipped(self, results: Mapping[int, Cell]) -> None:
        """Cells that had finished before, by number."""
        self._over.update(results)
        if results:
            self.say(f"finished before, not run again: {len(results)} of {len(self._cells)} cells")
            for result in results.values():
                self.say(f"  {' '.join(result.overrides) or 'one cell'}")

    def started(self, cell: PlannedCell) -> None:
        """A cell starts."""
        self._started[cell.number] = time.monotonic()
        if not self._wide:
            self.say(f"{self._place(cell)} {cell.title} -> {cell.directory}")

    def ended(self, cell: PlannedCell, result: Cell, seconds: float) -> None:
        """A cell has ended: its figures, or why it has none."""
        self._started.pop(cell.number, None)
        self._over[cell.number] = result
        if result.exit_code == 0:
            self._seconds.append((cell, seconds))
        parts = [result.outcome, *self._figures(cell, result.record), _span(seconds)]
        if result.exit_code != 0 and result.record is not None and result.record.reason:
            parts.append(result.record.reason.splitlines()[0])
        line = f"{self._place(cell)} {cell.title}: {' · '.join(parts)}"
        if not self._wide and len(self._over) < len(self._cells):
            line += f" ({self._left()})"
        self.say(line)

    def show(self, running: Mapping[int, Callable[[], str]], stopping: int | None) -> None:
        """Bring what is live up to date; ``running`` gives the last line of output for each number of a cell."""
        now = time.monotonic()
        if now - self._drawn < (REFRESH_SECONDS if self._wide else PLAIN_SECONDS):
            return
        self._drawn = now
        lines = [self._status(stopping)]
        for number, last_line in running.items():
            elapsed = now - self._started.get(number, now)
            lines.append(f"  {self._cells[number].title} · {_span(elapsed)} · {last_line()}")
        if not self._wide:
            self.say("\n".join(lines))
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text("\n".join(lines), overflow="ellipsis", no_wrap=True), refresh=True)

    def _status(self, stopping: int | None) -> str:
        failed = sum(result.exit_code != 0 for result in self._over.values())
        parts = [f"sweep {len(self._over)}/{len(self._cells)}", f"{len(self._started)} running"]
        if failed:
            parts.append(f"{failed} failed")
        if stopping is not None:
            parts.append("stopping: what runs ends first; once more stops it at once")
        return " · ".join([*parts, f"{_span(time.monotonic() - self._began)} so far", self._left()])

    def _left(self) -> str:
        left = [cell for number, cell in self._cells.items() if number not in self._over]
        seconds = self._left_seconds(left)
        return f"{len(left)} left" + ("" if seconds is None or not left else f", about {_span(seconds)}")

    def _left_seconds(self, left: Sequence[PlannedCell]) -> float | None:
        """From the mean time of finished cells that differ in seed and round alone; None before there is one for each:
        another strategy compiles for longer."""
        total = 0.0
        for cell in left:
            alike = [seconds for each, seconds in self._seconds if _kind(each) == _kind(cell)]
            if not alike:
                return None
            spent = time.monotonic() - self._started[cell.number] if cell.number in self._started else 0.0
            total += max(0.0, sum(alike) / len(alike) - spent)
        return total / min(self._parallel, max(1, len(left)))

    def _figures(self, cell: PlannedCell, record: RunRecord | None) -> list[str]:
        """Speed, and its ratio to eager's in the same round under the same settings, where that has run: of two single
        runs, which show no difference."""
        speed = _speed(record)
        if record is None or not speed:
            return []
        parts = [f"{speed:.2f} {'batches' if record.run == 'inference' else 'steps'}/s"]
        eager = next((found for found in map(_speed, self._eager_twins(cell)) if found), None)
        return [*parts, f"{NOT_SURE}{speed / eager:.2f}x eager"] if eager and record.label != "eager" else parts

    def _eager_twins(self, cell: PlannedCell) -> list[RunRecord]:
        twins = []
        for number, result in self._over.items():
            other, record = self._cells[number], result.record
            same = (other.shared, other.round) == (cell.shared, cell.round)
            if same and record is not None and record.label == "eager" and record.run == cell.described.run:
                twins.append(record)
        return twins

    def _place(self, cell: PlannedCell) -> str:
        return f"[{self._before + list(self._cells).index(cell.number) + 1}/{self._total}]"


def _kind(cell: PlannedCell) -> tuple[object, ...]:
    return (cell.arm, cell.start, [override for override in cell.shared if not override.startswith("seed=")])


def _speed(record: RunRecord | None) -> float | None:
    if record is None:
        return None
    return record.batches_per_second if record.run == "inference" else record.steady_steps_per_second


def _span(seconds: float) -> str:
    """A time for people: ``42 s``, ``3:05 min``, ``1:02:00 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
