"""Summary: the table at the end of a sweep, a row for each cell, from the cells' records."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def arm(self) -> tuple[str, ...]:
        """What a cell shares with the eager cell that it is compared with."""
        return tuple(override for override in self.overrides if not override.startswith("compile="))


def summarize(cells: Sequence[Cell], *, planned: int, sweep_dir: Path) -> str:
    """The sweep's table as text, with the reasons of cells that did not finish and how to see more."""
    eager: dict[tuple[str, ...], RunRecord] = {}
    for cell in cells:
        if cell.record is not None and cell.record.label == "eager" and _speed(cell.record):
            eager.setdefault(cell.arm, cell.record)
    lines = []
    inferring = [cell for cell in cells if cell.record is not None and cell.record.run == "inference"]
    for columns, row, chosen in (
        (COLUMNS, _row, [cell for cell in cells if cell not in inferring]),
        (INFERENCE_COLUMNS, _inference_row, inferring),
    ):
        if chosen:
            lines += ["", *_table([columns, *(row(cell, eager.get(cell.arm)) for cell in chosen)])]
    for cell in cells:
        if cell.exit_code != 0 and cell.record is not None and cell.record.reason:
            lines.append(f"{_name(cell)}: {cell.record.reason.splitlines()[0]}")
    if len(cells) < planned:
        lines.append(f"stopped after {len(cells)} of {planned} cells")
    lines.append(f"tensorboard --logdir {sweep_dir}")
    return "\n".join(lines)


def break_even_steps(record: RunRecord, eager: RunRecord) -> float | None:
    """Steps (batches, in inference) after which a compiled run has caught up with an eager one; infinite when it is not
    the faster of the two.

    What compiling cost is the larger of the extra warm-up and the time in the compiler, which includes validation's
    graphs. None when a figure is missing.
    """
    speed, eager_speed = _speed(record), _speed(eager)
    if not speed or not eager_speed or record.warmup_seconds is None or eager.warmup_seconds is None:
        return None
    gained = 1 / eager_speed - 1 / speed
    cost = max(record.warmup_seconds - eager.warmup_seconds, record.compile_seconds or 0.0)
    return cost / gained if gained > 0 else math.inf


def _speed(record: RunRecord) -> float | None:
    """Steps or batches a second."""
    return record.batches_per_second if record.run == "inference" else record.steady_steps_per_second


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
    speed, eager_speed = _speed(record), _speed(eager) if eager is not None else None
    ratio = speed / eager_speed if speed and eager_speed else None
    back = break_even_steps(record, eager) if eager is not None and record.label != "eager" else None
    return (
        _figure(ratio, ".2f") + ("x" if ratio is not None else ""),
        "never" if back == math.inf else "-" if back is None else f"{back:,.0f} {unit}",
    )


def _name(cell: Cell) -> str:
    return " ".join(cell.overrides) or cell.directory.name


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
