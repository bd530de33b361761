"""Summary: the table at the end of a sweep, a row for each cell, from the cells' records, and what they come to."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.evidence.comparison import compare
from trainer.evidence.crossings import break_even_steps, cost_of, step_seconds
from trainer.evidence.runs import Run
from trainer.evidence.workloads import workload_of
from trainer.telemetry.record import RunRecord

COLUMNS = ("cell", "status", "steps/s", "vs eager", "pays back", "compile s", "first step s", "warm-up s", "final loss")
INFERENCE_COLUMNS = (
    "cell",
    "status",
    "median ms",
    "p95 ms",
    "samples/s",
    "vs eager",
    "pays back",
    "compile s",
    "first batch s",
    "warm-up s",
)


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


def summarize(cells: Sequence[Cell], *, planned: int, sweep_dir: Path) -> str:
    """The sweep's table as text, with the reasons of cells that did not finish, the verdict and how to see more."""
    lines = []
    inferring = [cell for cell in cells if cell.record is not None and cell.record.run == "inference"]
    for columns, row, chosen in (
        (COLUMNS, _row, [cell for cell in cells if cell not in inferring]),
        (INFERENCE_COLUMNS, _inference_row, inferring),
    ):
        if chosen:
            lines += ["", *_table([columns, *(row(cell, _eager_beside(cell, cells)) for cell in chosen)])]
    for cell in cells:
        if cell.exit_code != 0 and cell.record is not None and cell.record.reason:
            lines.append(f"{_name(cell)}: {cell.record.reason.splitlines()[0]}")
    if len(cells) < planned:
        lines.append(f"stopped after {len(cells)} of {planned} cells")
    lines += _verdicts(cells)
    folder = shlex.quote(str(sweep_dir))
    lines += [f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"]
    return "\n".join(lines)


def _verdicts(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each workload that ran under several arms."""
    runs = [Run(cell.directory, cell.record) for cell in cells if cell.record is not None]
    compared = [found for found in compare(runs) if len(found.rows) > 1] if runs else []
    return [f"{found.workload}: {found.verdict}" for found in compared]


def _eager_beside(cell: Cell, cells: Sequence[Cell]) -> RunRecord | None:
    """The eager run of the same workload that is most like a cell's: in seed, then round, then start."""
    record = cell.record
    if record is None:
        return None
    workload = workload_of(record)
    eager = [
        other.record
        for other in cells
        if other.record is not None
        and other.record.label == "eager"
        and step_seconds(other.record)
        and workload_of(other.record) == workload
    ]

    def likeness(other: RunRecord) -> tuple[bool, bool, bool]:
        return (other.seed == record.seed, other.round == record.round, other.start == record.start)

    return max(eager, key=likeness, default=None)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        texts = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(texts).rstrip())
    return lines


def _row(cell: Cell, eager: RunRecord | None) -> tuple[str, ...]:
    record = cell.record
    if record is None:
        return (_name(cell), cell.outcome, *("-" for _ in COLUMNS[2:]))
    return (
        _name(cell),
        cell.outcome,
        _figure(record.steady_steps_per_second, ".2f"),
        *_against(record, eager, "steps"),
        _figure(record.compile_seconds, ".1f"),
        _figure(record.first_step_seconds, ".2f"),
        _figure(record.warmup_seconds, ".1f"),
        _figure(record.final_loss, ".4f"),
    )


def _inference_row(cell: Cell, eager: RunRecord | None) -> tuple[str, ...]:
    record = cell.record
    assert record is not None
    return (
        _name(cell),
        cell.outcome,
        *(
            _figure(None if seconds is None else seconds * 1e3, ".2f")
            for seconds in (record.latency_seconds_median, record.latency_seconds_p95)
        ),
        _figure(record.samples_per_second, ",.1f"),
        *_against(record, eager, "batches"),
        _figure(record.compile_seconds, ".1f"),
        _figure(record.first_step_seconds, ".2f"),
        _figure(record.warmup_seconds, ".1f"),
    )


def _against(record: RunRecord, eager: RunRecord | None, unit: str) -> tuple[str, str]:
    """How much faster than eager, and after how many steps or batches that has paid for compiling."""
    if eager is None:
        return "-", "-"
    seconds, eager_seconds = step_seconds(record), step_seconds(eager)
    ratio = "-" if seconds is None or eager_seconds is None else f"{eager_seconds / seconds:.2f}x"
    cost, eager_cost = cost_of(record), cost_of(eager)
    if record.label == "eager" or cost is None or eager_cost is None:
        return ratio, "-"
    back = break_even_steps(cost, eager_cost)
    return ratio, "never" if back == math.inf else f"{back:,.0f} {unit}"


def _name(cell: Cell) -> str:
    return " ".join(cell.overrides) or cell.directory.name


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
