"""Flags: what a reader must know of a cell before believing its figures, and in what compared runs differ."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from trainer.report.runs import Cell, Run, start_of
from trainer.telemetry.files import counted, printable
from trainer.telemetry.record import RunRecord

DECISIVE_VERSIONS = ("torch", "triton", "cuda")
"""Software that decides how fast compiled code is."""
MIN_STEPS = 20
"""Steady steps, or timed batches, below which a run's figures are thin."""
MAX_NEW_SHAPES = 0.2
"""Share of a run's steps that met a new shape; what is left out then are the rare ones, often the longest."""
MAX_SPREAD = 0.15
"""Between the slowest and the fastest run of a cell, over their median; more makes its figures thin."""
MAX_LOSS = 0.05
"""Relative distance of final losses, beyond the spread of either arm's runs, from which on they are said to differ."""
NOTHING_COMPILED = "nothing compiled"
"""Reason for which a comparison with eager is left out that nobody misses."""
NOT_COMPARED = "not compared"
"""Verdict of a comparison that would have shown nothing; graver than one that was not possible."""
BUSY = "measured while the machine was busy"
THIN = "thin"
"""First words of these flags."""


def deciding(record: RunRecord) -> dict[str, str]:
    """What runs of one workload must share to be compared. What a record does not hold is left out."""
    values: dict[str, str | None] = {
        "device": record.device,
        **{name: record.versions.get(name) for name in DECISIVE_VERSIONS},
        "precision": record.precision,
        "matrix products": record.matrix_precision,
        "world size": str(record.world_size),
    }
    return {name: value for name, value in values.items() if value is not None}


def unlike_conditions(runs: Sequence[Run]) -> list[str]:
    """``name: value (2 runs), other (1 run)`` for each condition that differs."""
    lines, facts = [], [deciding(run.record) for run in runs]
    for name in dict.fromkeys(name for each in facts for name in each):
        counts = Counter(each[name] for each in facts if name in each)
        values = [f"{value} ({counted(count, 'run')})" for value, count in counts.items()]
        lines += [f"{name}: {', '.join(values)}"] if len(values) > 1 else []
    return lines


def flags_of(cell: Cell, baseline: Cell | None) -> list[str]:
    """All flags of ``cell``, the gravest first."""
    flags = [_not_finished(run) for run in cell.failed] + [*_rolled_back(cell)]
    if busy := [each.busy for run in cell.finished if (each := run.record.machine) is not None and each.busy]:
        flags.append(f"{BUSY}: {busy[0]}{_of(busy, cell)}")
    if (parity := parity_of(cell)) not in (None, "passed"):
        flags.append(f"comparison with eager before the first step: {parity}")
    if other := next((network for run in cell.finished if (network := run.record.report.get("network"))), None):
        flags.append(f"another network: {other['class']} of {other['parameters']:,} parameters, not the task's")
    flags += [*_loss(cell, baseline), *_compiled(cell), *_thin(cell)]
    if unknown := [run for run in cell.cold if cell.compiles and start_of(run.record) is None]:
        flags.append(f"cache state unknown: its warm-up is counted as a cold start's{_of(unknown, cell)}")
    return flags


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


def _not_finished(run: Run) -> str:
    record = run.record
    outcome = "still running, or killed while it was" if record.status == "running" else record.status
    if record.status == "interrupted" and record.steps is not None:
        outcome += f" after {record.steps:,} steps"
    if record.reason:
        outcome += f": {record.reason.splitlines()[0]}"
    return f"{outcome} ({printable(str(run.directory))})"


def _rolled_back(cell: Cell) -> Iterator[str]:
    """Where parts ran eager; where torch skipped a frame within a region, in its words."""
    found: dict[str, list[str]] = {"ended in eager": [], "ran eager in part": []}
    for record in (run.record for run in cell.finished):
        fallbacks = (event.reason for event in record.events if event.kind == "fallback")
        reasons = [*record.eager_parts.values(), *fallbacks]
        if record.ended_in_eager:
            found["ended in eager"].append((reasons or ["no reason given"])[0])
        elif reasons:
            found["ran eager in part"].append(reasons[0])
    for what, reasons in found.items():
        if reasons:
            yield f"{what}{_of(reasons, cell)}: {reasons[0].splitlines()[0]}"


def _compiled(cell: Cell) -> Iterator[str]:
    """What was compiled in pieces, or again while it trained; validation has graphs of its own."""
    for kind, hint in (
        ("graph_break", "crucible explain names the lines"),
        ("recompile", "crucible report lists the reasons"),
    ):
        counts = [sum(one.kind == kind and one.phase != "validating" for one in run.record.events) for run in cell.runs]
        if most := max(counts, default=0):
            yield f"{counted(most, kind.replace('_', ' '))}; {hint}"


def _loss(cell: Cell, baseline: Cell | None) -> Iterator[str]:
    if baseline is None or len({run.record.steps for run in (*cell.finished, *baseline.finished)}) > 1:
        return  # longer runs have learned more
    ours, theirs = (
        [loss for run in each.finished if (loss := run.record.final_loss) is not None] for each in (cell, baseline)
    )
    if ours and theirs:
        own, base = statistics.median(ours), statistics.median(theirs)
        if abs(own - base) > max(MAX_LOSS * abs(base), max(ours) - min(ours), max(theirs) - min(theirs)):
            yield f"final loss {own:.4f}, the baseline's {base:.4f}"


def _thin(cell: Cell) -> Iterator[str]:
    records = [run.record for run in cell.finished]
    found = []
    if few := [count for one in records if (count := one.steady_steps) is not None and count < MIN_STEPS]:
        found.append(f"{min(few)} steady steps")
    new = [(one.new_shape_steps or 0, one.steady_steps or 0) for one in records]
    share = max((count / (count + steady or 1) for count, steady in new), default=0.0)
    if share > MAX_NEW_SHAPES:
        found.append(f"{share:.0%} of its steps met a new shape and are left out")
    seconds = [value for record in records if (value := record.step_seconds) is not None]
    spread = (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else 0.0
    if spread > MAX_SPREAD:
        found.append(f"its runs differ by {spread:.0%}")
    if found:
        yield f"{THIN}: {', '.join(found)}"


def _of(found: Sequence[object], cell: Cell) -> str:
    """`` (1 of 3 runs)`` where not all of them are meant."""
    return "" if len(found) == len(cell.finished) else f" ({len(found)} of {len(cell.finished)} runs)"
