"""Summary: the table at the end of a sweep, a row for each cell, from the cells' records, and what they come to."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.evidence.columns import ABSENT, footnotes, number, paid_back, speed
from trainer.evidence.comparison import WorkloadComparison, compare
from trainer.evidence.runs import Run
from trainer.evidence.tables import plain_lines
from trainer.telemetry.record import RunRecord


@dataclass(kw_only=True, slots=True)
class Cell:
    """One run of a sweep, ended."""

    overrides: list[str]
    """What sets this cell apart from the others."""
    directory: Path
    exit_code: int
    """Of its process; negative when a signal killed it."""
    record: RunRecord | None
    """None when the cell left none."""

    @property
    def outcome(self) -> str:
        """How it ended, for the table: the record's status, or what the exit code says."""
        if self.exit_code < 0:
            return f"killed ({signal.Signals(-self.exit_code).name})"
        if self.exit_code == 2:
            return "refused"
        if self.record is not None and self.record.status != "running":
            return self.record.status
        return "finished" if self.exit_code == 0 else f"crashed (exit code {self.exit_code})"


def summarize(cells: Sequence[Cell], *, planned: int, sweep_dir: Path, width: int) -> str:
    """The sweep's table as text, with the reasons of cells that did not finish, the verdict and how to see more.

    What a cell's row says of eager is what the comparison says of its arm: all repeats together, and ``~`` before what
    they do not show.
    """
    runs = [Run(cell.directory, cell.record) for cell in cells if cell.record is not None]
    compared = compare(runs) if runs else []
    lines: list[str] = []
    inferring = [cell for cell in cells if cell.record is not None and cell.record.run == "inference"]
    for chosen in ([cell for cell in cells if cell not in inferring], inferring):
        if chosen:
            lines += plain_lines(_columns(chosen, compared, inference=chosen is inferring), width)
    lines += footnotes(compared)
    for cell in cells:
        if cell.exit_code != 0 and cell.record is not None and cell.record.reason:
            lines.append(f"{_name(cell)}: {cell.record.reason.splitlines()[0]}")
    if len(cells) < planned:
        lines.append(f"stopped after {len(cells)} of {planned} cells")
    lines += [f"{found.workload}: {found.verdict}" for found in compared if len(found.rows) > 1]
    folder = shlex.quote(str(sweep_dir))
    lines += [f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"]
    return "\n".join(lines)


def _columns(cells: Sequence[Cell], compared: Sequence[WorkloadComparison], *, inference: bool) -> dict[str, list[str]]:
    """What the table shows of each cell, by heading; the status only where not all have finished."""
    records = [cell.record for cell in cells]
    outcomes = [cell.outcome for cell in cells]
    against = [_against(record, compared) for record in records]

    def figures(name: str, factor: float = 1.0) -> list[str]:
        values = [None if record is None else getattr(record, name) for record in records]
        return [number(None if value is None else value * factor) for value in values]

    losses = [None if record is None else record.final_loss for record in records]
    measured = {"steps/s": figures("steady_steps_per_second")}
    if inference:
        measured = {
            "median ms": figures("latency_seconds_median", 1e3),
            "p95 ms": figures("latency_seconds_p95", 1e3),
            "samples/s": figures("samples_per_second"),
        }
    return {
        "cell": [_name(cell) for cell in cells],
        "status": [ABSENT] * len(cells) if {*outcomes} == {"finished"} else outcomes,
        "start": [ABSENT if record is None else record.start or record.cache or ABSENT for record in records],
        **measured,
        "vs eager": [ratio for ratio, _ in against],
        f"pays back after {'batches' if inference else 'steps'}": [steps for _, steps in against],
        "compile s": figures("compile_seconds"),
        "warm-up s": figures("warmup_seconds"),
        "final loss": [ABSENT if loss is None else f"{loss:.4f}" for loss in losses],
    }


def _against(record: RunRecord | None, compared: Sequence[WorkloadComparison]) -> tuple[str, str]:
    """How much faster than eager a run's arm is, and after how many steps or batches that has paid for compiling."""
    for found in compared:
        for row in found.rows if len(found.rows) > 1 else []:
            if any(run.record is record for run in row.cell.finished):
                warm = any(run.record is record for run in row.cell.warm) and row.cell.compiles
                return speed(row, found), paid_back(row, warm=warm)
    return ABSENT, ABSENT


def _name(cell: Cell) -> str:
    return " ".join(cell.overrides) or cell.directory.name
