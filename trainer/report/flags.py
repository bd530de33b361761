"""Likeness: what should be the same in all runs of a comparison, what had better be, and which runs differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from trainer.printable import printable
from trainer.report.runs import Cell, Run, loose_settings
from trainer.report.verdicts import setup_seconds, step_seconds
from trainer.telemetry.record import RunRecord

DECISIVE_VERSIONS = ("torch", "triton", "cuda")
"""Software that decides how fast compiled code is."""


def conditions(record: RunRecord) -> dict[str, str]:
    """What runs of one workload must share to be compared. What a record does not say is left out."""
    told: dict[str, str | None] = {
        "device": record.device,
        **{name: record.versions.get(name) for name in DECISIVE_VERSIONS},
        "precision": record.precision,
        "matrix products": record.matrix_precision,
        "world size": str(record.world_size),
    }
    return {name: value for name, value in told.items() if value is not None}


def unlike_conditions(runs: Sequence[Run]) -> list[str]:
    """Conditions that differ, a line each with the values and how many runs have them."""
    return _differing([conditions(run.record) for run in runs])


def notes_on(runs: Sequence[Run]) -> list[str]:
    """Differences that need not matter: commits, other versions, settings beside the step."""
    return _differing([_circumstances(run.record) for run in runs])


def _circumstances(record: RunRecord) -> dict[str, str]:
    versions = {name: value or "none" for name, value in record.versions.items() if name not in DECISIVE_VERSIONS}
    commit = {} if record.git_commit is None else {"git commit": record.git_commit[:12] + _dirty(record.git_commit)}
    return {**commit, **versions, **loose_settings(record)}


def _dirty(commit: str) -> str:
    return "+dirty" if commit.endswith("+dirty") and len(commit) > 12 else ""


def _differing(told: Sequence[dict[str, str]]) -> list[str]:
    """``name: value (2 runs), other (1 run)`` for each name that has several values."""
    names = dict.fromkeys(name for each in told for name in each)
    lines = []
    for name in names:
        counts: dict[str, int] = {}
        for each in told:
            if name in each:
                counts[each[name]] = counts.get(each[name], 0) + 1
        if len(counts) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} ({_runs(count)})" for value, count in counts.items()))
    return lines


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


FEW_STEPS = 20
"""Steady steps, or timed batches, below which a run's figures are thin."""
MANY_NEW_SHAPES = 0.2
"""Share of a run's steps that met a new shape; what is left out then are the rare ones, often the longest."""
LARGE_SPREAD = 0.15
"""Between the slowest and the fastest run of a cell, over their median; more makes its figures thin."""
MUCH_SETUP = (1.0, 0.25)
"""Seconds and share of the baseline's by which building data and module must differ to be told."""
NOTHING_COMPILED = "nothing compiled"
"""Reason for which a comparison with eager is left out that nobody misses."""
NOT_COMPARED = "not compared"
"""Verdict of a comparison that would have said nothing; graver than that of one that was not possible."""
BUSY = "measured while the machine was busy"
THIN = "thin"
UNLIKE = "unlike"
"""First words of the flags that say so."""


def flags_of(cell: Cell, baseline: Cell | None) -> list[str]:
    """All that there is to say of ``cell``, the gravest first."""
    return [
        *_not_finished(cell),
        *_rolled_back(cell),
        *_busy(cell),
        *_unlike(cell, baseline),
        *_parity(cell),
        *_thin(cell),
        *_resumed(cell),
        *_caches(cell),
        *_setup(cell, baseline),
    ]


def parity_of(cell: Cell) -> str | None:
    """The worst verdict over the cell's runs, of the gate before the first step and of replayed CUDA graphs."""
    found: list[str] = []
    for run in cell.finished:
        report = run.record.report
        for facts in (report.get("parity"), report.get("cuda_graph", {}).get("parity")):
            if isinstance(facts, dict) and "verdict" in facts and facts.get("reason") != NOTHING_COMPILED:
                verdict, reason = str(facts["verdict"]), facts.get("reason")
                found.append(f"{verdict}: {reason}" if reason and verdict in ("skipped", NOT_COMPARED) else verdict)
    worst = [each for kind in ("failed", NOT_COMPARED, "passed") for each in found if each.startswith(kind)]
    return next(iter([*worst, *found]), None)


def _not_finished(cell: Cell) -> Iterator[str]:
    for run in cell.failed:
        record = run.record
        said = "still running, or killed while it was" if record.status == "running" else record.status
        if record.status == "interrupted" and record.steps is not None:
            said += f" after {record.steps:,} steps"
        if record.reason:
            said += f": {record.reason.splitlines()[0]}"
        yield f"{said} ({printable(str(run.directory))})"


def _rolled_back(cell: Cell) -> Iterator[str]:
    eager = [run.record for run in cell.finished if run.record.ended_in_eager]
    partly = [run.record for run in cell.finished if not run.record.ended_in_eager and _reasons(run.record)]
    for records, what in ((eager, "ended in eager"), (partly, "ran eager in part")):
        if records:
            reason = next(iter(_reasons(records[0])), "no reason given").splitlines()[0]
            yield f"{what}{_of(records, cell)}: {reason}"


def _reasons(record: RunRecord) -> list[str]:
    """Why parts ran eager; where torch skipped a frame within a region, in its words."""
    return [*record.eager_parts.values(), *(event.reason for event in record.events if event.kind == "fallback")]


def _busy(cell: Cell) -> Iterator[str]:
    busy = [run.record for run in cell.finished if run.record.machine is not None and run.record.machine.busy]
    if busy and busy[0].machine is not None:
        yield f"{BUSY}: {busy[0].machine.busy}{_of(busy, cell)}"


def _unlike(cell: Cell, baseline: Cell | None) -> Iterator[str]:
    if baseline is None or baseline is cell or not cell.finished or not baseline.finished:
        return
    theirs = [conditions(run.record) for run in baseline.finished]
    for name, values in _values([conditions(run.record) for run in cell.finished]).items():
        others = _values(theirs).get(name, [])
        if others and set(values) != set(others):
            yield f"{UNLIKE} the baseline: {name} {' and '.join(values)}, there {' and '.join(others)}"


def _parity(cell: Cell) -> Iterator[str]:
    verdict = parity_of(cell)
    if verdict is not None and verdict != "passed":
        yield f"comparison with eager before the first step: {verdict}"


def _thin(cell: Cell) -> Iterator[str]:
    records = [run.record for run in cell.finished]
    found = []
    few = [count for record in records if (count := _steady_count(record)) is not None and count < FEW_STEPS]
    if few:
        unit = "timed batches" if records[0].run == "inference" else "steady steps"
        found.append(f"{min(few)} {unit}")
    new = max((_share_of_new_shapes(record) for record in records), default=0.0)
    if new > MANY_NEW_SHAPES:
        found.append(f"{new:.0%} of its steps met a new shape and are left out")
    seconds = [value for record in records if (value := step_seconds(record)) is not None]
    spread = (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else 0.0
    if spread > LARGE_SPREAD:
        found.append(f"its runs differ by {spread:.0%}")
    within = max((record.repeat_spread or 0.0 for record in records), default=0.0)
    if within > LARGE_SPREAD:
        found.append(f"timed runs within a run differ by {within:.0%}")
    if found:
        yield f"{THIN}: {', '.join(found)}"


def _resumed(cell: Cell) -> Iterator[str]:
    resumed = [run.record for run in cell.finished if run.record.resumed_from]
    if resumed:
        yield f"resumed from {resumed[0].resumed_from}{_of(resumed, cell)}"


def _caches(cell: Cell) -> Iterator[str]:
    if cell.compiles and cell.others and not cell.cold:
        yield "cache state unknown: its warm-up is counted as a cold start's"


def _setup(cell: Cell, baseline: Cell | None) -> Iterator[str]:
    ours, theirs = (_median_setup(one.finished) if one is not None else None for one in (cell, baseline))
    if ours is None or theirs is None:
        return
    seconds, share = MUCH_SETUP
    if abs(ours - theirs) > max(seconds, share * theirs):
        yield f"setup took {ours:.1f} s, the baseline's {theirs:.1f} s; total times take the same for all arms"


def _median_setup(runs: Sequence[Run]) -> float | None:
    seconds = [each for each in (setup_seconds(run.record) for run in runs) if each is not None]
    return statistics.median(seconds) if seconds else None


def _steady_count(record: RunRecord) -> int | None:
    return record.batches if record.run == "inference" else record.steady_steps


def _share_of_new_shapes(record: RunRecord) -> float:
    return (record.new_shape_steps or 0) / ((record.new_shape_steps or 0) + (_steady_count(record) or 0) or 1)


def _values(told: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for each in told for name in each)
    return {name: list(dict.fromkeys(each[name] for each in told if name in each)) for name in names}


def _of(records: Sequence[RunRecord], cell: Cell) -> str:
    """`` (1 of 3 runs)`` where not all of them are meant."""
    return "" if len(records) == len(cell.finished) else f" ({len(records)} of {len(cell.finished)} runs)"
