"""Drifts: rows measured from runs, and which of their figures moved against a baseline, noise considered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainer.evidence.baselines import BaselineRow, Span, identity, overrides
from trainer.evidence.comparison import WorkloadComparison, compare
from trainer.evidence.flags import BUSY
from trainer.evidence.likeness import DECISIVE_VERSIONS
from trainer.evidence.rows import Row
from trainer.evidence.runs import Run

COUNTS = ("graphs", "graph_breaks", "recompiles", "cache_misses")
"""Fields of a record that are the same in every run of the same code."""
EITHER_WAY_WORSE = frozenset({"graphs"})
"""Counts of which fewer is no better: less may have been compiled."""
FEWEST_SECONDS = 1.0
"""Warm-ups that differ by less are not told: processes start that much apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A figure that is not what it was."""

    what: str
    """``ratio``, ``warm-up``, ...."""
    before: str
    now: str
    worse: bool

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """By how much figures may differ, relatively, beyond their noise."""

    ratio: float = 0.03
    """And of peak memory."""
    warmup: float = 0.25


@dataclass(kw_only=True, slots=True)
class Drift:
    """A row of the baseline and what it is now."""

    before: BaselineRow
    now: BaselineRow | None
    """None when it was not measured."""
    moves: list[Move] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Why a figure was not judged."""

    @property
    def worse(self) -> bool:
        """Whether anything moved for the worse, or the row has no figures any more."""
        return any(move.worse for move in self.moves)

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if self.now is None:
            return "not measured"
        if self.now.failed is not None:
            return "FAILED"
        if self.worse:
            return "WORSE"
        return "better" if self.moves else "not judged" if self.unknown else "same"


def measured(runs: Sequence[Run], *, without: Collection[str] = ()) -> list[BaselineRow]:
    """A row for each arm but eager of each workload in ``runs``, told apart by the overrides of their commands.

    Args:
        runs: Of any workloads, eager's among them.
        without: Overrides that are no part of a workload, because whoever measures it gives them anyway.

    Raises ValueError for runs of one workload that are unlike.
    """
    workloads: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        workloads.setdefault(identity(run.record.command)[0], []).append(run)
    rows = []
    for workload, members in workloads.items():
        for found in compare(members):
            if found.unlike:
                name = " ".join(workload) or found.workload
                raise ValueError(f"runs of {name} are unlike: {'; '.join(found.unlike)}")
            rows += [_measured(row, found, without) for row in found.rows if row.cell.label != "eager"]
    return rows


def drift(before: BaselineRow, now: BaselineRow | None, tolerances: Tolerances) -> Drift:
    """What moved between two rows of one key."""
    found = Drift(before=before, now=now)
    if now is None:
        return found
    if now.failed is not None:
        found.moves.append(Move(what="run", before="finished", now=now.failed, worse=True))
        return found
    warm = (before.warmup_seconds, now.warmup_seconds)
    if busy := now.busy or before.busy:
        found.unknown.append(f"times: {busy}")
    else:
        _compare(found, "ratio", before.ratio, now.ratio, tolerances.ratio, form="{:.3f}x", less_is_worse=True)
    if not busy and None not in warm and abs(warm[1].median - warm[0].median) >= FEWEST_SECONDS:  # type: ignore[union-attr]
        _compare(found, "warm-up", *warm, tolerances.warmup, form="{:.1f} s")
    memory = (before.peak_device_memory_gib, now.peak_device_memory_gib)
    _compare(found, "peak memory", *memory, tolerances.ratio, form="{:.2f} GiB")
    for name, value in before.counts.items():
        _compare_counts(found, name, value, now.counts.get(name))
    return found


def _compare(
    found: Drift,
    what: str,
    before: Span | None,
    now: Span | None,
    tolerance: float,
    *,
    form: str,
    less_is_worse: bool = False,
) -> None:
    """A figure moved when it did by more than the tolerance, and the two intervals are apart."""
    if before is None:
        return
    if now is None:
        found.unknown.append(f"{what} was {form.format(before.median)}, and is not known now")
        return
    if abs(now.median / before.median - 1) <= tolerance if before.median else now.median == before.median:
        return
    ends = (before.low, before.high, now.low, now.high)
    if what == "ratio" and None in ends:
        found.unknown.append("ratio: the runs do not tell their noise, see --rounds")
        return
    low, high = (before.median if end is None else end for end in ends[:2])
    new_low, new_high = (now.median if end is None else end for end in ends[2:])
    if new_low > high or new_high < low:
        worse = (now.median < before.median) == less_is_worse
        found.moves.append(Move(what=what, before=_text(before, form), now=_text(now, form), worse=worse))
    elif what == "ratio":
        told = f"{_text(before, form)} -> {_text(now, form)}"
        found.unknown.append(f"ratio {told} is within the noise; more --rounds or steps would tell")


def _compare_counts(found: Drift, name: str, before: int | list[int], now: int | list[int] | None) -> None:
    what = name.replace("_", " ")
    if now is None:
        found.unknown.append(f"{what}: {_count(before)} before, not known now")
        return
    (low, high), (new_low, new_high) = (value if isinstance(value, list) else [value, value] for value in (before, now))
    if new_low >= low and new_high <= high:
        return
    worse = name in EITHER_WAY_WORSE or new_high > high
    found.moves.append(Move(what=what, before=_count(before), now=_count(now), worse=worse))


def _measured(row: Row, found: WorkloadComparison, without: Collection[str]) -> BaselineRow:
    first = row.cell.runs[0].record
    base = found.baseline_row
    made = BaselineRow(
        workload=[word for word in overrides(first.command) if word not in without],
        arm=identity(first.command)[1],
        measured=(first.started or "").partition("T")[0],
        git_commit=first.git_commit,
        versions={name: version for name in DECISIVE_VERSIONS if (version := first.versions.get(name))},
        runs=len(row.cell.finished),
        ratio=Span.of(row.ratio),
        eager_step_seconds=None if base is None else Span.of(base.step_seconds),
        warmup_seconds=Span.of(row.cold_warmup_seconds),
        counts=_counts(row.cell.finished),
        busy=next((flag for each in (row, found.rows[0]) for flag in each.flags if flag.startswith(BUSY)), None),
    )
    peaks = [peak for run in row.cell.finished if (peak := run.record.peak_device_memory_gib) is not None]
    if peaks:
        made.peak_device_memory_gib = Span(max(peaks), min(peaks), max(peaks))
    if row.cell.failed:
        reason = row.cell.failed[0].record.reason or row.cell.failed[0].record.status
        made.failed = f"{len(row.cell.failed)} of {len(row.cell.runs)} runs {reason.splitlines()[0]}"
    elif row.ratio is None:
        made.failed = "no ratio: eager did not finish" if base is None else "no ratio: steady steps were not measured"
    return made


def _counts(runs: Sequence[Run]) -> dict[str, int | list[int]]:
    """Of cold starts alone, where there are any: warm ones compile less."""
    chosen = [run for run in runs if run.record.start == "cold"] or runs
    counts: dict[str, int | list[int]] = {}
    for name in COUNTS:
        values = [value for run in chosen if (value := getattr(run.record, name)) is not None]
        if values:
            counts[name] = values[0] if len(set(values)) == 1 else [min(values), max(values)]
    return counts


def _text(span: Span, form: str) -> str:
    if span.low is None or span.high is None or span.low == span.high:
        return form.format(span.median)
    low, high = (form.format(end).rstrip("x GiBs") for end in (span.low, span.high))
    return f"{form.format(span.median)} ({low} to {high})"


def _count(value: int | list[int]) -> str:
    return f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)
