"""Columns: what tables show of a row, as text for people and as plain figures for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.evidence.comparison import WorkloadComparison
from trainer.evidence.rows import Row
from trainer.evidence.statistics import Estimate, Ratio
from trainer.evidence.verdicts import rounded

ABSENT = "-"
NOT_SURE = "~"
"""Before a ratio, and a total time that rests on it, where no difference is shown."""
NOTE = f"{NOT_SURE} no difference is shown: one run of an arm, or runs of one arm that differ by as much"


def decision_columns(found: WorkloadComparison) -> dict[str, list[str]]:
    """Which arm is faster, when it has paid back, and what total time comes to."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        "runs": [_runs(row) for row in rows],
        f"{_one(found)} ms": [_estimate(row.step_seconds, 1e3) for row in rows],
        f"speed to {found.baseline}": [speed(row, found) for row in rows],
        "95% interval": [_interval(row) for row in rows],
        f"pays back after {found.unit}": [paid_back(row, warm=False) for row in rows],
    }
    for number in dict.fromkeys(number for row in rows for number in row.total_seconds):
        columns[f"s to {number:,}"] = [_total(row, row.total_seconds.get(number)) for row in rows]
    return kept(columns)


def warm_columns(found: WorkloadComparison) -> dict[str, list[str]]:
    """The same for starts with warm compile caches; the arms alone when there were none."""
    rows = found.rows
    columns = {"arm": [row.cell.arm for row in rows]}
    if any(row.cell.warm and row.cell.compiles for row in rows):
        columns["warm: warm-up s"] = [_estimate(row.warm_warmup_seconds) for row in rows]
        columns[f"warm: pays back after {found.unit}"] = [paid_back(row, warm=True) for row in rows]
        for number in dict.fromkeys(number for row in rows for number in row.total_seconds_warm):
            columns[f"warm: s to {number:,}"] = [_total(row, row.total_seconds_warm.get(number)) for row in rows]
    return kept(columns)


def speed_columns(found: WorkloadComparison) -> dict[str, list[str]]:
    """Steady state: step times, throughput, memory, energy."""
    rows = found.rows
    on_device = any(row.peak_device_memory_gib is not None for row in rows)
    memory = [row.peak_device_memory_gib if on_device else row.peak_process_memory_gib for row in rows]
    return kept(
        {
            "arm": [row.cell.arm for row in rows],
            "median ms": [_estimate(row.median_step_seconds, 1e3) for row in rows],
            "p95 ms": [_middle(row.p95_seconds, 1e3) for row in rows],
            "samples/s": [_middle(row.samples_per_second) for row in rows],
            "useful tokens/s": [_middle(row.useful_tokens_per_second) for row in rows],
            "padding": [ABSENT if row.padded_share is None else f"{row.padded_share:.1%}" for row in rows],
            "peak GiB" if on_device else "process GiB": [number(value) for value in memory],
            "J/sample": [_middle(row.joules_per_sample) for row in rows],
        }
    )


def compile_columns(found: WorkloadComparison) -> dict[str, list[str]]:
    """What each arm takes to begin with, and what was compiled."""
    rows = found.rows
    return kept(
        {
            "arm": [row.cell.arm for row in rows],
            "warm-up s": [_estimate(row.cold_warmup_seconds) for row in rows],
            f"first {_one(found)} s": [_middle(row.first_step_seconds) for row in rows],
            "compile s": [_middle(row.compile_seconds) for row in rows],
            "graphs": [_integer(row.graphs) for row in rows],
            "breaks": [_integer(row.graph_breaks) for row in rows],
            "recompiles": [_integer(row.recompiles) for row in rows],
            "parity": [(row.parity or ABSENT).partition(":")[0] for row in rows],
        }
    )


def plain(row: Row, found: WorkloadComparison) -> dict[str, Any]:
    """The row's figures by name, units in the names; None where there is none, ``never`` for what never pays back."""
    figures: dict[str, Any] = {
        "workload": found.workload,
        "task": found.task,
        "run": found.run,
        "device": found.device,
        "arm": row.cell.arm,
        "runs_cold": len(row.cell.cold),
        "runs_warm": len(row.cell.warm),
        "runs_other": len(row.cell.others),
        "runs_failed": len(row.cell.failed),
    }
    for name in ("step_seconds", "median_step_seconds", "p95_seconds", "samples_per_second"):
        figures |= _spread(name, getattr(row, name))
    figures |= _spread("useful_tokens_per_second", row.useful_tokens_per_second)
    figures["padded_share"] = row.padded_share
    for name in ("cold_warmup_seconds", "warm_warmup_seconds", "first_step_seconds", "compile_seconds"):
        figures |= _spread(name, getattr(row, name))
    for name in ("peak_device_memory_gib", "peak_process_memory_gib"):
        figures[name] = getattr(row, name)
    figures |= _spread("joules_per_sample", row.joules_per_sample)
    for name in ("graphs", "graph_breaks", "recompiles", "parity"):
        figures[name] = getattr(row, name)
    ratio: Ratio | None = row.ratio
    for name in ("value", "low", "high", "pairs", "basis", "verdict"):
        figures["ratio" if name == "value" else f"ratio_{name}"] = None if ratio is None else getattr(ratio, name)
    for name in ("break_even_steps", "break_even_steps_warm"):
        value = getattr(row, name)
        figures[name] = "never" if value == math.inf else value
    for kind, totals in (("", row.total_seconds), ("_warm", row.total_seconds_warm)):
        figures |= {f"total_seconds{kind}_at_{steps}": seconds for steps, seconds in totals.items()}
    return figures | {"flags": list(row.flags), "command": row.cell.command}


def kept(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """Columns in which some row has something."""
    return {name: texts for name, texts in columns.items() if any(text != ABSENT for text in texts)}


def _spread(name: str, value: Estimate | None) -> dict[str, float | None]:
    parts = {f"{name}_low": value.low, f"{name}_high": value.high} if value is not None else {}
    return {name: None if value is None else value.median, **(parts or {f"{name}_low": None, f"{name}_high": None})}


def marked(ratio: Ratio) -> str:
    """``1.57x``, or ``~1.02x`` where no difference is shown."""
    return f"{'' if ratio.shown else NOT_SURE}{ratio.value:.2f}x"


def _runs(row: Row) -> str:
    cell = row.cell
    counts = ((cell.cold, "cold"), (cell.warm, "warm"), (cell.others, ""), (cell.failed, "failed"))
    return ", ".join(f"{len(runs)} {what}".strip() for runs, what in counts if runs)


def speed(row: Row, found: WorkloadComparison) -> str:
    """How many times faster than the baseline."""
    if row is found.baseline_row:
        return "1"
    return ABSENT if row.ratio is None else marked(row.ratio)


def _interval(row: Row) -> str:
    """Ends that say nothing are cut short."""
    if row.ratio is None or row.ratio.low is None or row.ratio.high is None:
        return ABSENT
    return f"{row.ratio.low:.2f}-{min(row.ratio.high, 99):.2f}"


def _total(row: Row, seconds: float | None) -> str:
    mark = NOT_SURE if row.ratio is not None and not row.ratio.shown and seconds is not None else ""
    return mark + number(seconds)


def paid_back(row: Row, *, warm: bool) -> str:
    """Steps, to two digits; nothing where no difference is shown."""
    value = row.break_even_steps_warm if warm else row.break_even_steps
    return ABSENT if value is None else "never" if value == math.inf else rounded(value)


def _one(found: WorkloadComparison) -> str:
    return "batch" if found.unit == "batches" else "step"


def _estimate(value: Estimate | None, factor: float = 1.0) -> str:
    """The median, with half of the range over it: ``36.6 ±5%``."""
    if value is None or value.low is None or value.high is None or value.low == value.high:
        return _middle(value, factor)
    return f"{_middle(value, factor)} ±{(value.high - value.low) / 2 / value.median:.0%}"


def _middle(value: Estimate | None, factor: float = 1.0) -> str:
    return ABSENT if value is None else number(value.median * factor)


def number(value: float | None) -> str:
    """Three digits at least, and no exponent."""
    if value is None:
        return ABSENT
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def _integer(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def footnotes(comparisons: Sequence[WorkloadComparison]) -> list[str]:
    """What the marks in the tables mean, where they occur."""
    ratios = [row.ratio for found in comparisons for row in found.rows if row.ratio is not None]
    return [NOTE] if any(not ratio.shown for ratio in ratios) else []
