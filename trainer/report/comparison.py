"""Comparison: the arms of each workload side by side, with ratios to the baseline, break-even and a verdict; and what a
reader must know of an arm before believing its figures.

``crucible compare``, the end of a sweep, the report and published tables all show what is found here.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainer.advice import program
from trainer.report import statistics
from trainer.report.runs import Cell, Run, deciding, group, parity_of, start_of
from trainer.report.statistics import FASTER, NOT_SHOWN, SLOWER, Cost, Crossing, Estimate, Ratio, Sample, rounded
from trainer.telemetry.serialization import printable
from trainer.wording import counted

AT_STEPS = (500, 2000, 20000)
"""Numbers of steps for which total times are given."""
STARTING = ("import_seconds", "own_setup_seconds")
"""What a run's start takes, the same for every arm."""
SAME_WORK = 0.01
"""Samples a step of two arms that differ by less, relatively, count as equal: the last batch of an epoch is smaller."""
MIN_STEPS = 20
"""Steady steps, or timed batches, below which a run's figures are uncertain."""
MAX_NEW_SHAPES = 0.2
"""Share of a run's steps that met a new shape; what is left out then are the rare ones, often the longest."""
MAX_SPREAD = 0.15
"""Between the slowest and the fastest run of a cell, over their median; more makes its figures uncertain."""
MAX_LOSS = 0.05
"""Relative distance of final losses, beyond the spread of either arm's runs, from which on they are said to differ."""
BUSY = "measured while the machine was busy"
UNCERTAIN = "uncertain"
"""First words of these flags."""


@dataclass(kw_only=True, slots=True)
class Row:
    """What a cell is beside the baseline. None = not known; the cell has what its own runs measured."""

    cell: Cell
    step_seconds: Estimate | None = None
    """Mean seconds of a steady step, of each run: what total time is made of, and the ratio."""
    warm_warmup_seconds: Estimate | None = None
    """Of warm starts; of what compiles nothing, any. None when the workload has no warm run."""
    ratio: Ratio | None = None
    """To the baseline; None for the baseline itself and without one."""
    break_even_steps: float | None = None
    """Steps after which the arm has caught up with the baseline; infinite when the arm is slower, None when no
    difference is shown or a figure is missing. From the workload's ``start``, as all that follows."""
    total_seconds: dict[int, float] = field(default_factory=dict)
    """From the start of the process to the end of step N, by N; validation and checkpoints left out."""
    flags: list[str] = field(default_factory=list)
    """What the reader must know before believing the row."""
    cost: Cost | None = None
    """What break-even and total times are made of, its step the baseline's over the ratio; None without a figure."""
    fixed_seconds: float | None = None
    """What a run takes beyond its steady steps: imports, setup, warm-up and compiling. Imports and setup are the median
    over all runs of the workload, the same for all arms."""

    @property
    def is_faster(self) -> bool:
        """Whether it is shown to be faster than the baseline by what its arm is, not by what it fell back to."""
        fell_back = any(run.record.ended_in_eager for run in self.cell.finished)
        return self.ratio is not None and self.ratio.verdict == FASTER and not fell_back

    def total_at(self, steps: float) -> float | None:
        """Total seconds of ``steps`` steps, as in ``total_seconds``; for curves."""
        if self.cost is None or self.fixed_seconds is None:
            return None
        return self.fixed_seconds + steps * self.cost.step_seconds


@dataclass(kw_only=True, slots=True, repr=False)
class WorkloadComparison:
    """All arms of one workload."""

    workload: str
    baseline: str
    """Arm that the others are compared with."""
    rows: list[Row]
    """The baseline first."""
    start: str
    """``cold`` or ``warm``: the caches that more arms started with (cold where as many). Times count from them."""
    unlike: list[str]
    """What should be the same in all runs and is not, a line each: ``torch: 2.11.0 (2 runs), 2.15.0 (3 runs)``."""
    crossings: list[Crossing[str]] = field(default_factory=list)
    """Which arm, of those shown to be faster and the baseline, needs the least total time from which step on."""
    verdict: str = ""
    """One plain sentence: which arm to use, for how many steps."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.workload}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, the verdict and what to know."""
        from trainer.report import tables  # which is made of comparisons

        return tables.html([self])

    @property
    def busy(self) -> str | None:
        """That others took the processors while what is compared was measured, for which there is no verdict."""
        judged = [self.rows[0], *(row for row in self.rows if row.ratio is not None)]
        return next((flag for row in judged for flag in row.flags if flag.startswith(BUSY)), None)

    @property
    def best(self) -> str | None:
        """Name of the arm whose steady steps are the fastest: of those shown to be faster than the baseline; the
        baseline where all others are shown to be slower; None where no such difference is shown."""
        judged = [row for row in self.rows if row.ratio is not None]
        faster = {row.cell.arm: row.ratio.value for row in judged if row.ratio is not None and row.is_faster}
        if faster:
            return max(faster, key=lambda arm: faster[arm])
        slower = bool(judged) and all(row.ratio is not None and row.ratio.verdict == SLOWER for row in judged)
        return self.baseline if slower else None

    def to_dataframe(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each arm, by its name: steady step, ratio and 95% interval to the
        baseline, warm-up, break-even, and medians of the record's figures by their names there, which have the units.
        What has no number is NaN; the step at which nothing ever pays back is infinite.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_dataframe needs pandas, which is not installed: pip install pandas") from error
        from trainer.report import tables

        return pandas.DataFrame(tables.figures(self)).set_index("arm")

    @property
    def baseline_row(self) -> Row | None:
        """The row that the others are compared with; None when no such run finished."""
        first = self.rows[0]
        return first if first.cell.finished and first.cell.arm == self.baseline else None


def compare_runs(
    runs: Sequence[Run], *, baseline: str = "eager", at_steps: Sequence[int] = AT_STEPS
) -> list[WorkloadComparison]:
    """Compare the arms of each workload in ``runs``, in the order in which they come.

    Args:
        runs: Of any workloads; a workload is compared with itself only.
        baseline: Name of an arm, or of a label that one arm alone has.
        at_steps: Numbers of steps to give total times for.

    Raises ValueError when there are no runs, a number of steps is below 1, or the baseline asked for is none or several
    of the arms. ``eager`` alone may be missing: ratios are then None.
    """
    if not runs:
        raise ValueError("no runs to compare")
    if not at_steps or min(at_steps) < 1:
        raise ValueError(f"steps={min(at_steps, default=None)} must be at least 1")
    cells = group(runs)
    if baseline != "eager" and not any(baseline in (cell.arm, cell.label) for cell in cells):
        arms = dict.fromkeys(cell.arm for cell in cells)
        raise ValueError(f"baseline={baseline!r} is not one of the arms: {', '.join(arms)}")
    workloads: dict[str, list[Cell]] = {}
    for cell in cells:
        workloads.setdefault(cell.workload, []).append(cell)
    return [_compared(name, each, baseline, at_steps) for name, each in workloads.items()]


def _compared(workload: str, cells: list[Cell], baseline: str, at_steps: Sequence[int]) -> WorkloadComparison:
    named = [cell for cell in cells if cell.arm == baseline] or [cell for cell in cells if cell.label == baseline]
    if len(named) > 1:
        raise ValueError(f"baseline={baseline!r} is several arms: {', '.join(cell.arm for cell in named)}")
    base = named[0] if named else None
    everything = [run for cell in cells for run in cell.runs]
    measured = [run for cell in cells for run in cell.finished] or everything
    start = max(("cold", "warm"), key=lambda start: sum(bool(cell.started(start)) for cell in cells))
    found = WorkloadComparison(
        workload=workload,
        baseline=baseline if base is None else base.arm,
        start=start,
        rows=_rows(cells, base, start, at_steps),
        unlike=unlike_conditions(measured),
    )
    if found.baseline_row is None:
        how = "; compile=eager makes one" if base is None and baseline == "eager" else ""
        found.verdict = f"no {baseline} run of this workload has finished, so there is nothing to compare with{how}"
        return found
    first, known = found.rows[0], [row for row in found.rows if row.cost is not None]
    if first.cost is not None and len(known) > 1:
        # Of the baseline, and of rows shown to be faster by what their arms are, not by what they fell back to.
        candidates = [first, *(row for row in known if row.is_faster)]
        costs = {row.cell.arm: row.cost for row in candidates if row.cost is not None}
        found.crossings = statistics.envelope(costs, first.cost)
    found.verdict = _verdict(found)
    return found


def _verdict(found: WorkloadComparison) -> str:
    base = found.baseline
    ratios = [row.ratio for row in found.rows if row.ratio is not None]
    if not ratios and not any(row.cell.finished for row in found.rows[1:]):
        return f"nothing but {base} was measured, so there is nothing to compare it with"
    if not ratios:
        without = base if found.rows[0].step_seconds is None else f"every arm but {base}"
        return f"{without} has no steady steps, so there is nothing to compare; longer runs have some"
    if found.busy is not None:
        return f"cannot tell, {found.busy}"
    if any(ratio.shown for ratio in ratios):
        text = _advice(found)
    elif all(ratio.low is None for ratio in ratios):
        text = "cannot tell from single runs; repeat with hydra.launcher.rounds=3"
    else:
        text = f"no difference from {base} is shown; more rounds or longer runs may show one"
    # What weakens it: uncertain figures of the arms that it names, or runs that are unlike.
    arms = {base, *(crossing.arm for crossing in found.crossings)}
    doubtful = any(flag.startswith(UNCERTAIN) for row in found.rows if row.cell.arm in arms for flag in row.flags)
    weak = [*(["on uncertain figures"] if doubtful else []), *(["of runs that are unlike"] if found.unlike else [])]
    return text + (f" ({', '.join(weak)})" if weak else "")


def _advice(found: WorkloadComparison) -> str:
    base, crossings = found.baseline, found.crossings
    if not crossings:
        return f"steady steps differ from {base}'s; without what warming up takes there is no telling when it pays"
    caches = "with warm caches: " if found.start == "warm" else ""
    if len(crossings) == 1:
        only = crossings[0].arm
        advice = f"no strategy tried is shown to beat {base}" if only == base else f"use {only}"
        return f"{caches}{advice} for any number of steps"
    words = [f"{caches}for fewer than {rounded(crossings[1].from_steps)} steps use {crossings[0].arm}"]
    for crossing, following in itertools.pairwise(crossings[1:]):
        words.append(f"from {rounded(crossing.from_steps)} to {rounded(following.from_steps)} {crossing.arm}")
    return "; ".join([*words, f"above, {crossings[-1].arm}"])


def _rows(cells: Sequence[Cell], baseline: Cell | None, start: str, at_steps: Sequence[int]) -> list[Row]:
    """A row for each cell, the baseline's first."""
    runs = [run for cell in cells for run in cell.finished]
    parts = [statistics.estimate([getattr(run.record, name) for run in runs]) for name in STARTING]
    start_seconds = sum(part.median for part in parts if part is not None)
    ordered = cells if baseline is None else [baseline, *(cell for cell in cells if cell is not baseline)]
    rows = [Row(cell=cell, step_seconds=cell.over("step_seconds"), flags=flags_of(cell, baseline)) for cell in ordered]
    any_warm = any(cell.warm and cell.compiles for cell in cells)
    base = rows[0] if baseline is not None else None
    for row in rows:
        if any_warm:
            row.warm_warmup_seconds = row.cell.over("warmup_seconds", "warm")
        _compare(row, base, start)
        if row.cost is not None:
            base_cost = None if base is None else base.cost
            row.fixed_seconds = start_seconds + statistics.overhead_seconds(row.cost, base_cost)
        row.total_seconds = {steps: total for steps in at_steps if (total := row.total_at(steps)) is not None}
    return rows


def _compare(row: Row, base: Row | None, start: str) -> None:
    """Set ratio, cost and break-even of a row; the baseline's own come first."""
    other = None if row is base else base
    work = 1.0 if base is None else _work(row, base)
    if work != 1.0:
        row.flags.append(
            f"its steps hold {1 / work:.2f} times the samples of the baseline's: ratio, break-even and total times "
            "are for steps of the baseline's size"
        )
    step = None if row.step_seconds is None else row.step_seconds.median * work
    if other is not None:
        ours, theirs = row.cell.finished, other.cell.finished
        # ``cached`` starts as its store happens to be, and eager beside it cold: then runs pair without their starts.
        starts = {run.record.start for run in ours} & {run.record.start for run in theirs}
        row.ratio = statistics.ratio(_samples(ours, work, starts), _samples(theirs, 1.0, starts))
        # Tables, pictures, break-even and the verdict go by ``shown`` alone: what withholds a verdict belongs here.
        if row.ratio is not None and any(flag.startswith(BUSY) for flag in (*row.flags, *other.flags)):
            row.ratio = dataclasses.replace(row.ratio, verdict=NOT_SHOWN)  # others may have made the difference
        if row.ratio is not None and other.step_seconds is not None:
            # By the ratio, not by the arm's own median: pairs leave out what the machine did from round to round.
            step = other.step_seconds.median / row.ratio.value
    names = ("warmup_seconds", "warmup_steps", "compile_seconds", "preparation_seconds")
    medians = {name: found.median for name in names if (found := row.cell.over(name, start)) is not None}
    if step is None or "warmup_seconds" not in medians:
        return
    medians["warmup_steps"] = medians.get("warmup_steps", 0.0) / work
    row.cost = Cost(step_seconds=step, **medians)
    if other is not None and other.cost is not None and row.ratio is not None and row.ratio.shown:
        row.break_even_steps = statistics.break_even_steps(row.cost, other.cost)


def wait_seconds(row: Row, base: Row) -> float | None:
    """What a row's start takes beyond the baseline's: what faster steps have to make up for. None without a cost."""
    if row.cost is None or base.cost is None:
        return None
    return statistics.overhead_seconds(row.cost, base.cost) - statistics.overhead_seconds(base.cost, None)


def _samples(runs: Sequence[Run], work: float, starts: Collection[str | None]) -> list[Sample]:
    return [
        Sample(seconds * work, (run.record.seed, run.record.round, run.record.start if starts else None))
        for run in runs
        if (seconds := run.record.step_seconds) is not None
    ]


def _work(row: Row, base: Row) -> float:
    """Samples a step of the baseline over samples a step of the row; 1 when they are alike or not known."""
    ours, theirs = (each.cell.over("samples_per_step") for each in (row, base))
    if ours is None or theirs is None or abs(ours.median / theirs.median - 1) < SAME_WORK:
        return 1.0
    return theirs.median / ours.median


# ---- flags -----------------------------------------------------------------------------------------------------------


def unlike_conditions(runs: Sequence[Run]) -> list[str]:
    """``name: value (2 runs), other (1 run)`` for each condition that differs."""
    lines, facts = [], [deciding(run.record) | {"record schema": str(run.record.schema)} for run in runs]
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
        flags.append(f"comparison with eager: {parity}")
    if other := next((network for run in cell.finished if (network := run.record.report.get("network"))), None):
        flags.append(f"another network: {other['class']} of {other['parameters']:,} parameters, not the task's")
    if cell.profiled:
        flags.append(f"{counted(len(cell.profiled), 'run')} under the profiler left out")
    flags += [*_loss(cell, baseline), *_compiled(cell), *_uncertain(cell)]
    if unknown := [run for run in cell.cold if cell.compiles and start_of(run.record) is None]:
        flags.append(f"cache state unknown: its warm-up is counted as a cold start's{_of(unknown, cell)}")
    return flags


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
    explain, report = (shlex.join(program(f"scripts.{name}")) for name in ("explain", "report"))
    if cell.runs[0].record.script is not None:
        explain = "crucible.explain_module"
    for kind, hint in (
        ("graph_break", f"{explain} names the lines"),
        ("recompile", f"{report} lists the reasons"),
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
        own, base = median(ours), median(theirs)
        if abs(own - base) > max(MAX_LOSS * abs(base), max(ours) - min(ours), max(theirs) - min(theirs)):
            yield f"final loss {own:.4f}, the baseline's {base:.4f}"


def _uncertain(cell: Cell) -> Iterator[str]:
    records = [run.record for run in cell.finished]
    found = []
    if few := [count for one in records if (count := one.steady_steps) is not None and count < MIN_STEPS]:
        found.append(f"{min(few)} steady steps")
    new = [(one.new_shape_steps or 0, one.steady_steps or 0) for one in records]
    share = max((count / (count + steady or 1) for count, steady in new), default=0.0)
    if share > MAX_NEW_SHAPES:
        found.append(f"{share:.0%} of its steps met a new shape and are left out")
    seconds = [value for record in records if (value := record.step_seconds) is not None]
    spread = (max(seconds) - min(seconds)) / median(seconds) if len(seconds) > 1 else 0.0
    if spread > MAX_SPREAD:
        found.append(f"its runs differ by {spread:.0%}")
    if found:
        yield f"{UNCERTAIN}: {', '.join(found)}"


def _of(found: Sequence[object], cell: Cell) -> str:
    """`` (1 of 3 runs)`` where not all of them are meant."""
    return "" if len(found) == len(cell.finished) else f" ({len(found)} of {len(cell.finished)} runs)"
