"""Tables: comparisons for the terminal (rich), as Markdown and as JSON; and of scaling: one training on several numbers
of devices, its samples a second over as many times those of one device.

Runs of a scaling share task, strategies with their options, and all settings but the devices, how these train together,
and the batch. What a step really held is measured: samples a second times seconds a step.
"""

from __future__ import annotations

import io
import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.flags import step_seconds, unlike_conditions
from trainer.report.runs import Run, fixed_settings, set_parameters
from trainer.report.statistics import Estimate, Ratio, estimate, rounded
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ABSENT = "-"
NOT_SURE = "~"
"""Before a ratio, and a total time that rests on it, where no difference is shown."""
NOTE = f"{NOT_SURE} no difference is shown: one run of an arm, or runs of one arm that differ by as much"
ANYTHING = 10.0
"""Times that an arm may be as fast, from which on an interval says nothing: two rounds that differ by as much."""
GAP = 2
"""Blanks between columns."""
TEXT_COLUMNS = ("arm", "runs", "status")
"""Columns that are read from the left; all others hold figures."""
MIN_ARM = 12
"""Characters that an arm's name gets at least; longer ones go on in the next line."""
Columns = dict[str, list[str]]
"""A table for the terminal, Markdown and the page: texts by heading, those that name a row first."""


def decision(found: WorkloadComparison) -> Columns:
    """What people decide by: which arm is faster, how long it is waited for, when that has paid back, what it holds.
    Columns without a figure are left out."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        "runs": [f"{len(row.cell.finished)}{f' of {len(row.cell.runs)}' * bool(row.cell.failed)}" for row in rows],
        "step ms": [estimated(row.step_seconds, 1e3) for row in rows],
        f"speed to {found.baseline}": [speed(row, found) for row in rows],
        "95% interval": [interval(row.ratio) or ABSENT for row in rows],
        "warm-up s": [_middle(row.cold_warmup_seconds) for row in rows],
        "warm start s": [ABSENT if not row.cell.compiles else _middle(row.warm_warmup_seconds) for row in rows],
        "pays back after steps": [_steps(row.break_even_steps) for row in rows],
    }
    return kept(columns | _memory(rows))


def all_figures(found: WorkloadComparison) -> Columns:
    """The other figures, for the page and Markdown: total times, steady state, what was compiled."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        **{
            f"{kind}s to {steps:,}": [_total(row, getattr(row, name).get(steps)) for row in rows]
            for kind, name in (("", "total_seconds"), ("warm caches: ", "total_seconds_warm"))
            for steps in dict.fromkeys(steps for row in rows for steps in getattr(row, name))
        },
        "warm caches: pays back after steps": [_steps(row.break_even_steps_warm) for row in rows],
        "median ms": [estimated(row.median_step_seconds, 1e3) for row in rows],
        "p95 ms": [_middle(row.p95_seconds, 1e3) for row in rows],
        "samples/s": [_middle(row.samples_per_second) for row in rows],
        "useful tokens/s": [_middle(row.useful_tokens_per_second) for row in rows],
        "padding": [ABSENT if row.padded_share is None else f"{row.padded_share.median:.1%}" for row in rows],
        "of roofline": [ABSENT if row.roofline_share is None else f"{row.roofline_share.median:.1%}" for row in rows],
        "J/sample": [_middle(row.joules_per_sample) for row in rows],
        "final loss": [ABSENT if row.final_loss is None else f"{row.final_loss.median:.4f}" for row in rows],
        "first step s": [_middle(row.first_step_seconds) for row in rows],
        "compile s": [_middle(row.compile_seconds) for row in rows],
        "graphs": [_count(row.graphs) for row in rows],
        "breaks": [_count(row.graph_breaks) for row in rows],
        "recompiles": [_count(row.recompiles) for row in rows],
        "parity": [(row.parity or ABSENT).partition(":")[0] for row in rows],
    }
    return kept(columns)


def _memory(rows: Sequence[Row]) -> Columns:
    if any(row.peak_device_memory_gib is not None for row in rows):
        return {"peak GiB": [number(row.peak_device_memory_gib) for row in rows]}
    return {"process GiB": [number(row.peak_process_memory_gib) for row in rows]}


def kept(columns: Columns) -> Columns:
    """Columns in which some row has something."""
    return {name: texts for name, texts in columns.items() if any(text != ABSENT for text in texts)}


def speed(row: Row, found: WorkloadComparison) -> str:
    """How many times faster than the baseline."""
    if row is found.baseline_row:
        return "1"
    return ABSENT if row.ratio is None else marked(row.ratio)


def marked(ratio: Ratio) -> str:
    """``1.57x``, or ``~1.02x`` where no difference is shown."""
    return f"{'' if ratio.shown else NOT_SURE}{ratio.value:.2f}x"


def interval(ratio: Ratio | None) -> str:
    """``1.52-1.61``; empty without one, or where it could be anything."""
    if ratio is None or ratio.low is None or ratio.high is None or ratio.high >= ANYTHING:
        return ""
    return f"{ratio.low:.2f}-{ratio.high:.2f}"


def _steps(value: float | None) -> str:
    return ABSENT if value is None else "never" if value == math.inf else rounded(value)


def _count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """Three digits at least, and no exponent."""
    if value is None:
        return ABSENT
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def footnotes(comparisons: Sequence[WorkloadComparison]) -> list[str]:
    """What the marks in the tables mean, where they occur."""
    ratios = [row.ratio for found in comparisons for row in found.rows if row.ratio is not None]
    return [NOTE] if any(not ratio.shown for ratio in ratios) else []


def _total(row: Row, seconds: float | None) -> str:
    mark = NOT_SURE if row.ratio is not None and not row.ratio.shown and seconds is not None else ""
    return mark + number(seconds)


def estimated(value: Estimate | None, factor: float = 1.0) -> str:
    """The median, with half of the range over it: ``36.6 ±5%``."""
    if value is None or value.low is None or value.high is None or value.low == value.high:
        return _middle(value, factor)
    return f"{_middle(value, factor)} ±{(value.high - value.low) / 2 / value.median:.0%}"


def _middle(value: Estimate | None, factor: float = 1.0) -> str:
    return ABSENT if value is None else number(value.median * factor)


def conditions(found: WorkloadComparison) -> str:
    """Device and versions in a line."""
    device = "device not recorded" if found.device == "n/a" else found.device
    return " · ".join([device, *(f"{name} {version}" for name, version in found.versions.items())])


def remarks(found: WorkloadComparison) -> list[str]:
    """What to know of all and of each arm, alike remarks once."""
    arms: dict[str, list[str]] = {}
    for row in found.rows:
        for flag in row.flags:
            arms.setdefault(flag, []).append(row.cell.arm)
    listed = {
        flag: ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
        for flag, names in arms.items()
    }
    return [
        *(f"unlike: {line}" for line in found.unlike),
        *(f"differs: {line}" for line in found.notes),
        *(f"{names}: {flag}" for flag, names in listed.items()),
    ]


# ---- the terminal -----------------------------------------------------------------------------------------------


def show(comparisons: Sequence[WorkloadComparison], console: Console) -> None:
    """Print heading, table, verdict, what to know of the arms, and what the marks mean."""
    from rich.padding import Padding
    from rich.text import Text

    def line(text: str, style: str = "", *, left: int = 2, above: int = 0) -> None:
        console.print(Padding(Text(text, style=style), (above, 0, 0, left), expand=False))

    for found in comparisons:
        line(found.workload, "bold", left=0)
        line(conditions(found), "dim")
        console.print(Padding(_table(decision(found), console.width - 2), (1, 0, 0, 2), expand=False))
        line(f"verdict: {found.verdict}", "bold", above=1)
        for remark in remarks(found):
            line(remark)
        console.print()
    for note in footnotes(comparisons):
        console.print(note, markup=False, highlight=False)


def plain_lines(columns: Columns, width: int) -> Iterator[str]:
    """The columns as lines of text no longer than ``width``."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, highlight=False, color_system=None).print(_table(columns, width))
    yield from ("", *(line.rstrip() for line in out.getvalue().splitlines()))


def _table(columns: Columns, width: int) -> RenderableType:
    """For rich: the first column gets what the others leave of ``width``, its names broken between strategies."""
    from rich.table import Table
    from rich.text import Text

    widths = {name: max(map(len, (*name.split(), *texts))) for name, texts in columns.items()}
    first, *others = columns
    left = max(MIN_ARM, width - sum(GAP + widths[name] for name in others))
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in columns:
        side: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        heading = "\n".join(textwrap.wrap(name, widths[name]))
        made.add_column(heading, justify=side, overflow="fold", no_wrap=name != first)
    for name, *texts in zip(*columns.values(), strict=True):
        lines = [""]
        for word in re.findall(r"[^ +=-]*[ +=-]*", name):
            if len(lines[-1] + word.rstrip()) > left and lines[-1]:
                lines.append("")
            lines[-1] += word
        made.add_row(Text("\n".join(line.rstrip() for line in lines)), *map(Text, texts))
    return made


# ---- files ------------------------------------------------------------------------------------------------------


def markdown(comparisons: Sequence[WorkloadComparison]) -> str:
    """Pipe tables, a heading for each workload."""
    lines: list[str] = []
    for found in comparisons:
        lines += [f"## {_escaped(found.workload)}", "", conditions(found), "", *piped(decision(found)), ""]
        lines += [f"**Verdict:** {_escaped(found.verdict)}.", "", *piped(all_figures(found)), ""]
        if notes := [_escaped(line) for line in remarks(found)]:
            lines += [*(f"- {line}" for line in notes), ""]
        lines += ["Commands:", "", "```bash", *(row.cell.command for row in found.rows), "```", ""]
    lines += [line.replace("*", r"\*", 1) for line in footnotes(comparisons)]
    return "\n".join(lines).rstrip() + "\n"


def piped(columns: Columns) -> list[str]:
    """A table in Markdown."""
    rules = (" --- " if name in TEXT_COLUMNS else " ---: " for name in columns)
    rows = (columns, *(map(_escaped, row) for row in zip(*columns.values(), strict=True)))
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'|'.join(rules)}|", *body]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")


def as_json(comparisons: Sequence[WorkloadComparison]) -> str:
    """A list of workloads with their rows, the folders of their runs, crossings and verdict."""
    names = ("workload", "task", "device", "processor", "versions", "baseline", "verdict", "unlike", "notes")
    values = [
        {name: getattr(found, name) for name in names}
        | {"crossings": [asdict(crossing) for crossing in found.crossings], "rows": list(map(_plain, found.rows))}
        for found in comparisons
    ]
    return json.dumps(values, indent=1, allow_nan=False)


def _plain(row: Row) -> dict[str, Any]:
    """The row's figures by name, units in the names; None where there is none, ``never`` for what never pays back."""
    figures: dict[str, Any] = {"arm": row.cell.arm, "command": row.cell.command}
    for name in ("cold", "warm", "others", "failed"):
        figures[f"runs_{name.removesuffix('s')}"] = len(getattr(row.cell, name))
    for name, value in ((one.name, getattr(row, one.name)) for one in fields(row)):
        if isinstance(value, Estimate):
            figures |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
        elif name.startswith("total_seconds"):
            figures |= {f"{name}_at_{steps}": seconds for steps, seconds in value.items()}
        elif name == "ratio":
            figures[name] = getattr(value, "value", None)
            figures |= {f"ratio_{part}": getattr(value, part, None) for part in ("low", "high", "pairs", "verdict")}
        elif name not in ("cell", "cost", "cost_warm"):
            figures[name] = "never" if value == math.inf else value
    kept = ("status", "seed", "round", "start", "git_commit", "warmup_seconds")
    runs = [
        {"directory": str(run.directory), "step_seconds": step_seconds(run.record)}
        | {name: getattr(run.record, name) for name in kept}
        for run in row.cell.runs
    ]
    return figures | {"runs": runs}


# ---- scaling: one training on several numbers of devices -------------------------------------------------------------

DEVICES = frozenset({"trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.sharded_checkpoints"})
SAME_BATCH = 0.01
"""Batches that differ by less, relatively, are the same: the last one of an epoch is smaller."""


@dataclass(kw_only=True, slots=True)
class Scaling:
    """One training on several numbers of devices."""

    name: str
    kind: str
    """What stays the same as devices are added: weak and strong scaling are not to be mixed up."""
    table: dict[str, list[str]]
    """A row for each number of devices and way to train together, as columns by heading."""
    unlike: list[str]
    """What differs beside them and decides speed."""

    def lines(self, width: int) -> Iterator[str]:
        """The table with its heading as lines of text."""
        yield f"scaling: {self.name}"
        yield f"  {self.kind}"
        yield from (f"  unlike: {line}" for line in self.unlike)
        yield from (f"  {line}" for line in plain_lines(self.table, width - 2))
        yield ""

    def markdown(self) -> str:
        """The same as Markdown, after a blank line."""
        unlike = "".join(f"Unlike: {line}.\n\n" for line in self.unlike)
        return "\n".join([f"\n## Scaling: {self.name}\n\n{self.kind}.\n\n{unlike}", *piped(self.table), ""])


def scalings(runs: Sequence[Run]) -> list[Scaling]:
    """Those trainings in ``runs`` that finished on several numbers of devices."""
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        record = run.record
        if record.status != "finished" or not record.samples_per_second:
            continue
        settings = {name: value for name, value in fixed_settings(record).items() if name not in DEVICES}
        said = [f"{name}={value}" for name, value in settings.items() if not name.endswith("batch_size")]
        alike.setdefault((record.task, record.label, *_options(record), *sorted(said)), []).append(run)
    return [_scaling(members) for members in alike.values() if len({run.record.world_size for run in members}) > 1]


def _scaling(members: Sequence[Run]) -> Scaling:
    rows: dict[tuple[Any, ...], list[RunRecord]] = {}
    first = members[0].record
    for record in sorted((run.record for run in members), key=lambda record: (record.world_size, _how(record))):
        batch = [value for name, value in fixed_settings(record).items() if name.endswith("batch_size")]
        rows.setdefault((record.world_size, _how(record), *batch), []).append(record)
    base = next((records for key, records in rows.items() if key[0] == 1), [])
    steps = [
        statistics.median((one.samples_per_second or 0.0) * (step_seconds(one) or 0.0) for one in records)
        for records in rows.values()
    ]
    rates = [estimate([one.samples_per_second for one in records]) for records in rows.values()]
    medians = [0.0 if rate is None else rate.median for rate in rates]
    efficiencies = [estimate([_efficiency(one, base) for one in records]) for records in rows.values()]
    columns = {
        "arm": [f"{key[0]} device{'s' if key[0] > 1 else ''} {key[1]}".strip() for key in rows],
        "runs": [str(len(records)) for records in rows.values()],
        "samples of a step": [number(samples) for samples in steps],
        "samples/s": [estimated(rate) for rate in rates],
        "times one device": [f"{rate / medians[0]:.2f}x" if base else ABSENT for rate in medians],
        "efficiency": [estimated(efficiency) for efficiency in efficiencies],
    }
    return Scaling(
        name=f"{first.task} · {' '.join([first.label, *_options(first)])}",
        kind=_kind([int(key[0]) for key in rows], steps),
        table=kept(columns),
        unlike=[line for line in unlike_conditions(members) if not line.startswith("world size")],
    )


def _kind(devices: Sequence[int], steps: Sequence[float]) -> str:
    shares = {count: samples / count for count, samples in zip(devices, steps, strict=True)}
    if _alike(list(shares.values())):
        return f"weak scaling: each device keeps its batch of {number(steps[0])} samples, a step has more of them"
    if _alike(steps):
        return f"strong scaling: a step keeps its {number(steps[0])} samples, each device has fewer"
    each = ", ".join(f"{number(share)} on {count}" for count, share in shares.items())
    return f"neither weak nor strong scaling: samples of a device in a step differ ({each})"


def _alike(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= SAME_BATCH * max(values)


def _efficiency(record: RunRecord, base: Sequence[RunRecord]) -> float | None:
    """Samples a second over as many times those of one device, of the same seed and round where there is one."""
    same = [one for one in base if (one.seed, one.round) == (record.seed, record.round)] or base
    rates = [rate for one in same if (rate := one.samples_per_second)]
    if not rates or not record.samples_per_second:
        return None
    return record.samples_per_second / record.world_size / statistics.median(rates)


def _how(record: RunRecord) -> str:
    return "" if record.world_size == 1 else fixed_settings(record).get("trainer.strategy", "")


def _options(record: RunRecord) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(set_parameters(record).items())]
