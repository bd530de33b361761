"""Tables: comparisons for the terminal (rich), as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.flags import step_seconds
from trainer.report.runs import Run
from trainer.report.statistics import Estimate, Ratio, rounded

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ABSENT = "-"
NOT_SURE = "~"
"""Before a ratio, and a total time that rests on it, where no difference is shown."""
NOTE = f"{NOT_SURE} no difference is shown: one run of an arm, or runs of one arm that differ by as much"
GAP = 2
"""Blanks between columns."""
SINGLE = ("padded_share", "peak_device_memory_gib", "peak_process_memory_gib", "graphs", "graph_breaks", "recompiles")
"""Figures of a row without a range."""
TEXT_COLUMNS = ("arm", "runs", "status")
"""Columns that are read from the left; all others hold figures."""
Columns = dict[str, list[str]]
"""A table for the terminal, Markdown and the page: texts by heading, those that name a row first."""


def tables_of(found: WorkloadComparison) -> list[Columns]:
    """All tables of a workload, each as its columns by heading, the arms first: what to decide by, the same for warm
    compile caches, steady state, and warm-up. Columns and tables without a figure are left out."""
    tables = [kept(table) for table in (_decision(found), _warm(found), _speed(found), _compile(found))]
    return [table for table in tables if len(table) > 1]


def _decision(found: WorkloadComparison) -> Columns:
    """Which arm is faster, when it has paid back, and what total time comes to."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        "runs": [_runs(row) for row in rows],
        f"{_one(found)} ms": [estimated(row.step_seconds, 1e3) for row in rows],
        f"speed to {found.baseline}": [speed(row, found) for row in rows],
        "95% interval": [_interval(row) for row in rows],
        f"pays back after {found.unit}": [paid_back(row, warm=False) for row in rows],
    }
    for steps in dict.fromkeys(steps for row in rows for steps in row.total_seconds):
        columns[f"s to {steps:,}"] = [_total(row, row.total_seconds.get(steps)) for row in rows]
    return columns


def _warm(found: WorkloadComparison) -> Columns:
    rows = found.rows
    columns = {"arm": [row.cell.arm for row in rows]}
    if any(row.cell.warm and row.cell.compiles for row in rows):
        columns["warm: warm-up s"] = [estimated(row.warm_warmup_seconds) for row in rows]
        columns[f"warm: pays back after {found.unit}"] = [paid_back(row, warm=True) for row in rows]
        for steps in dict.fromkeys(steps for row in rows for steps in row.total_seconds_warm):
            columns[f"warm: s to {steps:,}"] = [_total(row, row.total_seconds_warm.get(steps)) for row in rows]
    return columns


def _speed(found: WorkloadComparison) -> Columns:
    rows = found.rows
    on_device = any(row.peak_device_memory_gib is not None for row in rows)
    memory = [row.peak_device_memory_gib if on_device else row.peak_process_memory_gib for row in rows]
    return {
        "arm": [row.cell.arm for row in rows],
        "median ms": [estimated(row.median_step_seconds, 1e3) for row in rows],
        "p95 ms": [_middle(row.p95_seconds, 1e3) for row in rows],
        "samples/s": [_middle(row.samples_per_second) for row in rows],
        "useful tokens/s": [_middle(row.useful_tokens_per_second) for row in rows],
        "padding": [ABSENT if row.padded_share is None else f"{row.padded_share:.1%}" for row in rows],
        "peak GiB" if on_device else "process GiB": [number(value) for value in memory],
        "J/sample": [_middle(row.joules_per_sample) for row in rows],
        "final loss": [ABSENT if row.final_loss is None else f"{row.final_loss.median:.4f}" for row in rows],
    }


def _compile(found: WorkloadComparison) -> Columns:
    rows = found.rows
    counts = {"graphs": "graphs", "breaks": "graph_breaks", "recompiles": "recompiles"}
    return {
        "arm": [row.cell.arm for row in rows],
        "warm-up s": [estimated(row.cold_warmup_seconds) for row in rows],
        f"first {_one(found)} s": [_middle(row.first_step_seconds) for row in rows],
        "compile s": [_middle(row.compile_seconds) for row in rows],
        **{
            heading: [ABSENT if (count := getattr(row, name)) is None else str(count) for row in rows]
            for heading, name in counts.items()
        },
        "parity": [(row.parity or ABSENT).partition(":")[0] for row in rows],
    }


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


def paid_back(row: Row, *, warm: bool) -> str:
    """Steps, to two digits; nothing where no difference is shown."""
    value = row.break_even_steps_warm if warm else row.break_even_steps
    return ABSENT if value is None else "never" if value == math.inf else rounded(value)


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


def _runs(row: Row) -> str:
    cell = row.cell
    counts = ((cell.cold, "cold"), (cell.warm, "warm"), (cell.others, ""), (cell.failed, "failed"))
    return ", ".join(f"{len(runs)} {what}".strip() for runs, what in counts if runs)


def _interval(row: Row) -> str:
    """Far ends are cut short."""
    if row.ratio is None or row.ratio.low is None or row.ratio.high is None:
        return ABSENT
    return f"{row.ratio.low:.2f}-{min(row.ratio.high, 99):.2f}"


def _total(row: Row, seconds: float | None) -> str:
    mark = NOT_SURE if row.ratio is not None and not row.ratio.shown and seconds is not None else ""
    return mark + number(seconds)


def _one(found: WorkloadComparison) -> str:
    return "batch" if found.unit == "batches" else "step"


def estimated(value: Estimate | None, factor: float = 1.0) -> str:
    """The median, with half of the range over it: ``36.6 ±5%``."""
    if value is None or value.low is None or value.high is None or value.low == value.high:
        return _middle(value, factor)
    return f"{_middle(value, factor)} ±{(value.high - value.low) / 2 / value.median:.0%}"


def _middle(value: Estimate | None, factor: float = 1.0) -> str:
    return ABSENT if value is None else number(value.median * factor)


def show(comparisons: Sequence[WorkloadComparison], console: Console) -> None:
    """Print heading, tables no wider than the console, verdict, what to know of the arms, and what the marks mean."""
    from rich.padding import Padding
    from rich.text import Text

    def line(text: str, style: str = "", *, left: int = 2, above: int = 0) -> None:
        console.print(Padding(Text(text, style=style), (above, 0, 0, left), expand=False))

    for found in comparisons:
        line(found.workload, "bold", left=0)
        line(_conditions(found), "dim")
        for columns in tables_of(found):
            for part in _parts(columns, console.width - 2):
                console.print(Padding(_table(part, console.width - 2), (1, 0, 0, 2), expand=False))
        line(f"verdict: {found.verdict}", "bold", above=1)
        for remark in remarks(found):
            line(remark)
        console.print()
    for note in footnotes(comparisons):
        console.print(note, markup=False, highlight=False)


def plain_lines(columns: Columns, width: int) -> Iterator[str]:
    """The columns as lines of text no longer than ``width``."""
    from rich.console import Console

    for part in _parts(kept(columns), width):
        out = io.StringIO()
        Console(file=out, width=width, highlight=False, color_system=None).print(_table(part, width))
        yield from ("", *(line.rstrip() for line in out.getvalue().splitlines()))


def markdown(comparisons: Sequence[WorkloadComparison]) -> str:
    """Pipe tables, a heading for each workload."""
    lines: list[str] = []
    for found in comparisons:
        lines += [f"## {_escaped(found.workload)}", "", _conditions(found), ""]
        for columns in tables_of(found):
            lines += [*piped(columns), ""]
        lines += [f"**Verdict:** {_escaped(found.verdict)}.", ""]
        if notes := [_escaped(line) for line in remarks(found)]:
            lines += [*(f"- {line}" for line in notes), ""]
        lines += ["Commands:", "", "```bash", *(row.cell.command for row in found.rows), "```", ""]
    lines += [line.replace("*", r"\*", 1) for line in footnotes(comparisons)]
    return "\n".join(lines).rstrip() + "\n"


def piped(columns: Columns) -> list[str]:
    """A table in Markdown."""
    rules = (" --- " if name in TEXT_COLUMNS else " ---: " for name in columns)
    rows = zip(*columns.values(), strict=True)
    return [_pipes(columns), f"|{'|'.join(rules)}|", *(_pipes(map(_escaped, row)) for row in rows)]


def _pipes(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def as_csv(comparisons: Sequence[WorkloadComparison]) -> str:
    """A line for each cell, a column for each figure; empty where there is none."""
    rows = []
    for found in comparisons:
        shared = {name: getattr(found, name) for name in ("workload", "task", "run", "device")}
        rows += [shared | _plain(row) | {"flags": "; ".join(row.flags)} for row in found.rows]
    out = io.StringIO()
    fields = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, fieldnames=fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_json(comparisons: Sequence[WorkloadComparison]) -> str:
    """A list of workloads with their rows, the folders of their runs, crossings and verdict."""
    names = ("workload", "task", "run", "device", "processor", "versions", "baseline", "verdict", "unlike", "notes")
    values = [
        {name: getattr(found, name) for name in names}
        | {
            "crossings": [asdict(crossing) for crossing in found.crossings],
            "rows": [_plain(row) | {"runs": [_run(run) for run in row.cell.runs]} for row in found.rows],
        }
        for found in comparisons
    ]
    return json.dumps(values, indent=1, allow_nan=False)


def _plain(row: Row) -> dict[str, Any]:
    """The row's figures by name, units in the names; None where there is none, ``never`` for what never pays back."""
    figures: dict[str, Any] = {"arm": row.cell.arm}
    for name in ("cold", "warm", "others", "failed"):
        figures[f"runs_{name.removesuffix('s')}"] = len(getattr(row.cell, name))
    for name in (
        *("step_seconds", "median_step_seconds", "p95_seconds", "samples_per_second", "useful_tokens_per_second"),
        *("padded_share", "cold_warmup_seconds", "warm_warmup_seconds", "first_step_seconds", "compile_seconds"),
        *("peak_device_memory_gib", "peak_process_memory_gib", "joules_per_sample"),
        *("graphs", "graph_breaks", "recompiles"),
    ):
        value = getattr(row, name)
        figures[name] = value.median if isinstance(value, Estimate) else value
        if name not in SINGLE:
            figures |= {f"{name}_{end}": getattr(value, end, None) for end in ("low", "high")}
    figures["parity"] = row.parity
    for name in ("value", "low", "high", "pairs", "basis", "verdict"):
        figures["ratio" if name == "value" else f"ratio_{name}"] = getattr(row.ratio, name, None)
    for name in ("break_even_steps", "break_even_steps_warm"):
        figures[name] = "never" if getattr(row, name) == math.inf else getattr(row, name)
    for kind, totals in (("", row.total_seconds), ("_warm", row.total_seconds_warm)):
        figures |= {f"total_seconds{kind}_at_{steps}": seconds for steps, seconds in totals.items()}
    return figures | {"flags": list(row.flags), "command": row.cell.command}


def _run(run: Run) -> dict[str, Any]:
    names = ("status", "seed", "round", "start", "git_commit", "warmup_seconds")
    values = {name: getattr(run.record, name) for name in names}
    return {"directory": str(run.directory), **values, "step_seconds": step_seconds(run.record)}


def _conditions(found: WorkloadComparison) -> str:
    return " · ".join([found.device, *(f"{name} {version}" for name, version in found.versions.items())])


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


def _parts(columns: Columns, width: int) -> Iterator[Columns]:
    """The columns in as few tables as it takes for each to fit, each with the arm first, which may be broken."""
    (first, names), *others = columns.items()
    room = width - max(len(word) for name in names for word in _words(name))
    part, left = {first: names}, room
    for name, texts in others:
        needed = GAP + _width(name, texts)
        if needed > left and len(part) > 1:
            yield part
            part, left = {first: names}, room
        part[name] = texts
        left -= needed
    yield part


def _width(name: str, texts: Sequence[str]) -> int:
    """Characters that a column takes; headings break between words."""
    return max(map(len, (*name.split(), *texts)))


def _words(name: str) -> list[str]:
    """Where a name may be broken: after a blank, a plus, an equals sign or a dash."""
    return re.findall(r"[^ +=-]*[ +=-]*", name)


def _table(columns: Columns, width: int) -> RenderableType:
    """For rich: the first column gets what the others leave of ``width``, its names in lines."""
    from rich.table import Table
    from rich.text import Text

    first, *others = columns
    left = width - sum(GAP + _width(name, columns[name]) for name in others)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name, texts in columns.items():
        side: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        heading = "\n".join(textwrap.wrap(name, _width(name, texts)))
        made.add_column(heading, justify=side, overflow="fold", no_wrap=name != first)
    for name, *texts in zip(*columns.values(), strict=True):
        lines = [""]
        for word in _words(name):
            if len(lines[-1] + word.rstrip()) > left and lines[-1]:
                lines.append("")
            lines[-1] += word
        made.add_row(Text("\n".join(line.rstrip() for line in lines)), *map(Text, texts))
    return made


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")
