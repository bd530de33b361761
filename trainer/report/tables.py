"""Tables: comparisons for the terminal (rich), as Markdown and as JSON; and of scaling: one training on several numbers
of devices, its samples a second over as many times those of one device."""

from __future__ import annotations

import io
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from html import escape as escaped
from typing import TYPE_CHECKING, Any

from trainer import wording
from trainer.report.runs import DECISIVE_VERSIONS, Cell, Run, deciding, fixed_settings, parity_of
from trainer.report.statistics import Estimate, Ratio, estimate, rounded
from trainer.telemetry.record import RunRecord, set_parameters
from trainer.telemetry.serialization import nan_to_none

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trainer.report.comparison import Row, WorkloadComparison

ABSENT = "-"
NOT_SURE = "~"
"""Before a ratio, and a total time that rests on it, where no difference is shown."""
NOTE = f"{NOT_SURE} no difference is shown: one run of an arm, or runs of one arm that differ by as much"
ANYTHING = 10.0
"""Times that an arm may be as fast, from which on an interval says nothing: two rounds that differ by as much."""
GAP = 2
"""Blanks between columns."""
TEXT_COLUMNS = ("model", "arm", "runs", "kernel", "training", "strategy", "what", "change")
"""Columns that are read from the left; all others hold figures."""
MIN_ARM = 12
"""Characters that an arm's name gets at least; longer ones go on in the next line."""
Columns = dict[str, list[str]]
"""A table for the terminal, Markdown and the page: texts by heading, those that name a row first."""


def decision(found: WorkloadComparison) -> Columns:
    """What people decide by: which arm is faster, how long it is waited for, when that has paid back, its memory."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        "runs": [f"{len(row.cell.finished)}{f' of {len(row.cell.runs)}' * bool(row.cell.failed)}" for row in rows],
        "step ms": [estimated(row.step_seconds, 1e3) for row in rows],
        f"speed to {found.baseline}": [
            "1" if row is found.baseline_row else ABSENT if row.ratio is None else marked(row.ratio) for row in rows
        ],
        "95% interval": [interval(row.ratio) or ABSENT for row in rows],
        "warm-up s": [_middle(row.cell.over("warmup_seconds", "cold")) for row in rows],
        "warm start s": [ABSENT if not row.cell.compiles else _middle(row.warm_warmup_seconds) for row in rows],
        f"pays back after steps{', warm' * (found.start == 'warm')}": [_steps(row.break_even_steps) for row in rows],
        "peak GiB": [_most(row.cell.over("peak_device_memory_gib")) for row in rows],
    }
    return kept(columns)


def all_figures(found: WorkloadComparison) -> Columns:
    """The other figures, for the page and Markdown: total times, steady state, what was compiled."""
    rows = found.rows
    columns = {
        "arm": [row.cell.arm for row in rows],
        **{
            f"s to {steps:,}": [_total(row, steps) for row in rows]
            for steps in dict.fromkeys(steps for row in rows for steps in row.total_seconds)
        },
    }
    for heading, (name, text) in FIGURES.items():
        values = [figure_of(row.cell, name) for row in rows]
        columns[heading] = [ABSENT if value is None else text(value) for value in values]
    columns["parity"] = [(parity_of(row.cell) or ABSENT).partition(":")[0] for row in rows]
    return kept(columns)


def figure_of(cell: Cell, name: str) -> Estimate | None:
    """Over the runs of a cell: a field of the record; what compiling took, over cold starts."""
    return cell.over(name, "cold" if name == "compile_seconds" else None)


def kept(columns: Columns) -> Columns:
    """Columns in which some row has something."""
    return {name: texts for name, texts in columns.items() if any(text != ABSENT for text in texts)}


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


def number(value: float | None) -> str:
    """Three digits at least, two below 0.01, and no exponent."""
    if value is None:
        return ABSENT
    size = abs(value)
    if 0 < size < 0.01:
        return wording.number(value, 3)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def footnotes(comparisons: Sequence[WorkloadComparison]) -> list[str]:
    """What the marks in the tables mean, where they occur."""
    ratios = [row.ratio for found in comparisons for row in found.rows if row.ratio is not None]
    return [NOTE] if any(not ratio.shown for ratio in ratios) else []


def _total(row: Row, steps: int) -> str:
    seconds = row.total_seconds.get(steps)
    unsure = seconds is not None and row.ratio is not None and not row.ratio.shown
    return NOT_SURE * unsure + number(seconds)


def estimated(value: Estimate | None, factor: float = 1.0) -> str:
    """The median, with half of the range over it: ``36.6 ±5%``."""
    if value is None or value.low is None or value.high is None or value.low == value.high:
        return _middle(value, factor)
    return f"{_middle(value, factor)} ±{(value.high - value.low) / 2 / value.median:.0%}"


def _middle(value: Estimate | None, factor: float = 1.0) -> str:
    return ABSENT if value is None else number(value.median * factor)


def _most(value: Estimate | None) -> str:
    """Of memory, and of counts, which are whole numbers."""
    most = None if value is None else max(value.values)
    return f"{most:,}" if isinstance(most, int) else number(most)


FIGURES: dict[str, tuple[str, Callable[[Estimate], str]]] = {
    "median ms": ("steady_step_seconds_median", partial(estimated, factor=1e3)),
    "p95 ms": ("steady_step_seconds_p95", partial(_middle, factor=1e3)),
    "samples/s": ("samples_per_second", _middle),
    "useful tokens/s": ("useful_tokens_per_second", _middle),
    "padding": ("padded_share", lambda value: f"{value.median:.1%}"),
    "of roofline": ("roofline_share", lambda value: f"{value.median:.1%}"),
    "J/sample": ("joules_per_sample", _middle),
    "final loss": ("final_loss", lambda value: f"{value.median:.4f}"),
    "compile s": ("compile_seconds", _middle),
    "graphs": ("graphs", _most),
    "breaks": ("graph_breaks", _most),
    "recompiles": ("recompiles", _most),
}
"""Columns of ``all_figures``: the field of the record, and how its estimate is shown."""


def conditions(found: WorkloadComparison) -> str:
    """On what and when it was measured, in a line."""
    return conditions_of([run.record for row in found.rows for run in row.cell.finished or row.cell.runs])


def conditions_of(records: Sequence[RunRecord]) -> str:
    """Device, processor, versions, dates, and what was seen of the machine, in one line."""
    facts = [record.machine for record in records if record.machine is not None]

    def span(name: str, form: str) -> str:
        seen = sorted(value for each in facts if (value := getattr(each, name)) is not None)
        ends = dict.fromkeys(str(end) if isinstance(end, int) else number(end) for end in (*seen[:1], *seen[-1:]))
        return form.format(" to ".join(ends)) if seen else ""

    def joined(values: Iterable[str | None]) -> str:
        return " / ".join(dict.fromkeys(value for value in values if value))

    commits = (commit[:10] + commit[40:] for commit in (record.git_commit or "" for record in records))  # or "+dirty"
    software = (*DECISIVE_VERSIONS, "python")
    versions = {name: joined(record.versions.get(name) for record in records) for name in software}
    throttled = sorted({reason for each in facts for reason in each.gpu_throttled})
    parts = [
        joined(record.device for record in records),
        joined(record.processor for record in records if record.processor != record.device),
        span("processors", "{} processors"),
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"commit {joined(commits) or 'unknown'}",
        joined((record.started or "")[:10] for record in records),
        span("load_average", "load average {}"),
        span("gpu_clock_mhz", "GPU clock {} MHz"),
        span("gpu_power_watts", "at most {} W"),
        span("gpu_power_limit_watts", "power limit {} W"),
        span("gpu_celsius", "{} °C"),
    ]
    if any(each.gpu_clock_mhz is not None for each in facts):
        parts.append(f"throttled: {', '.join(throttled) or 'no'}")
    return " · ".join(filter(None, parts))


def remarks(found: WorkloadComparison) -> list[str]:
    """What to know of all and of each arm, alike remarks once."""
    arms: dict[str, list[str]] = {}
    for row in found.rows:
        for flag in row.flags:
            arms.setdefault(flag, []).append(row.cell.arm)
    return [
        *(f"unlike: {line}" for line in found.unlike),
        *(f"{', '.join(names)}: {flag}" for flag, names in arms.items()),
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
        heading, of_text = "\n".join(textwrap.wrap(name, widths[name])), name in TEXT_COLUMNS
        made.add_column(heading, justify="left" if of_text else "right", overflow="fold", no_wrap=name != first)
    for name, *texts in zip(*columns.values(), strict=True):
        lines = [""]
        for word in re.findall(r"[^ +=-]*[ +=-]*", name):
            if len(lines[-1] + word.rstrip()) > left and lines[-1]:
                lines.append("")
            lines[-1] += word
        made.add_row(Text("\n".join(line.rstrip() for line in lines)), *map(Text, texts))
    return made


# ---- files ------------------------------------------------------------------------------------------------------


def markdown(comparisons: Sequence[WorkloadComparison], scalings: Sequence[tuple[str, Columns]] = ()) -> str:
    """Pipe tables, a heading for each workload and scaling."""
    lines: list[str] = []
    for found in comparisons:
        lines += [f"## {_escaped(found.workload)}", "", conditions(found), "", *piped(decision(found)), ""]
        lines += [f"**Verdict:** {_escaped(found.verdict)}.", "", *piped(all_figures(found)), ""]
        if notes := [_escaped(line) for line in remarks(found)]:
            lines += [*(f"- {line}" for line in notes), ""]
        lines += ["Commands:", "", "```bash", *(row.cell.command for row in found.rows), "```", ""]
    for name, table in scalings:
        lines += [f"## Scaling: {_escaped(name)}", "", *piped(table), ""]
    lines += [line.replace("*", r"\*", 1) for line in footnotes(comparisons)]
    return "\n".join(lines).rstrip() + "\n"


def piped(columns: Columns) -> list[str]:
    rules = (" --- " if name in TEXT_COLUMNS else " ---: " for name in columns)
    rows = (columns, *(map(_escaped, row) for row in zip(*columns.values(), strict=True)))
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'|'.join(rules)}|", *body]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")


def html(comparisons: Sequence[WorkloadComparison]) -> str:
    """For a notebook: heading, table, verdict, what to know of the arms, and what the marks mean."""
    parts, escape = [], partial(escaped, quote=False)
    for found in comparisons:
        columns = decision(found)
        aligned = [f"text-align: {'left' if name in TEXT_COLUMNS else 'right'}" for name in columns]
        head = "".join(f'<th style="{style}">{escape(name)}</th>' for name, style in zip(columns, aligned, strict=True))
        rows = [
            "".join(f'<td style="{style}">{escape(text)}</td>' for text, style in zip(row, aligned, strict=True))
            for row in zip(*columns.values(), strict=True)
        ]
        parts += [f"<p><b>{escape(found.workload)}</b><br>{escape(conditions(found))}</p>"]
        parts += [f"<table><thead><tr>{head}</tr></thead><tbody>", *(f"<tr>{row}</tr>" for row in rows)]
        parts += ["</tbody></table>", f"<p><b>verdict: {escape(found.verdict)}</b></p>"]
        parts += [f"<p>{escape(line)}</p>" for line in remarks(found)]
    return "\n".join([*parts, *(f"<p>{escape(note)}</p>" for note in footnotes(comparisons))])


def figures(found: WorkloadComparison) -> list[dict[str, Any]]:
    """A row for each arm: what people decide by, and medians by the names of the record's fields; None = not known."""
    rows = []
    for row in found.rows:
        cell, ratio = row.cell, row.ratio
        peak = cell.over("peak_device_memory_gib")
        rows.append(
            {
                "arm": cell.arm,
                "runs": len(cell.finished),
                "failed": len(cell.failed),
                "step_seconds": _median(row.step_seconds),
                "ratio": None if ratio is None else ratio.value,
                "ratio_low": None if ratio is None else ratio.low,
                "ratio_high": None if ratio is None else ratio.high,
                "outcome": None if ratio is None else ratio.verdict,
                "warmup_seconds": _median(cell.over("warmup_seconds", "cold")),
                "warm_warmup_seconds": _median(row.warm_warmup_seconds),
                "break_even_steps": row.break_even_steps,
                "peak_device_memory_gib": None if peak is None else max(peak.values),
                **{name: _median(figure_of(cell, name)) for name, _ in FIGURES.values()},
            }
        )
    return rows


def _median(value: Estimate | None) -> float | None:
    return None if value is None else value.median


def as_json(comparisons: Sequence[WorkloadComparison]) -> str:
    """The comparisons with their rows; of an arm its name, its command, the folders of its runs, and medians by the
    names of the record's fields. What has no number, and the step at which nothing ever pays back, is null."""
    plain = []
    for found in comparisons:
        rows = []
        for row in found.rows:
            cell = row.cell
            runs = {kind: [str(run.directory) for run in getattr(cell, kind)] for kind in ("cold", "warm", "failed")}
            figures = {name: one.median for name, _ in FIGURES.values() if (one := figure_of(cell, name)) is not None}
            own = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "cell"}
            rows.append({"arm": cell.arm, "command": cell.command, "runs": runs, **own, "figures": figures})
        plain.append({field.name: getattr(found, field.name) for field in fields(found)} | {"rows": rows})
    return json.dumps(nan_to_none(plain), indent=1, allow_nan=False, default=lambda part: nan_to_none(asdict(part)))


# ---- scaling: one training on several numbers of devices -------------------------------------------------------------

DEVICES = frozenset({"trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.sharded_checkpoints"})


def scalings(runs: Sequence[Run]) -> list[tuple[str, Columns]]:
    """Name and table of each training in ``runs`` that finished on several numbers of devices. What a step held says
    whether each device kept its batch. Runs on other boards, versions or in another precision are apart."""
    alike: dict[tuple[str, ...], list[RunRecord]] = {}
    for record in (run.record for run in runs):
        if record.status == "finished" and record.samples_per_step:
            facts = fixed_settings(record) | deciding(record)
            apart = [name for name in facts if name in DEVICES or name.endswith(("batch_size", "world size"))]
            options = [f"{name}={value}" for name, value in sorted(set_parameters(record).items())]
            name = f"{record.task} · {' '.join([record.label, *options])}"
            same = sorted(f"{name}={value}" for name, value in facts.items() if name not in apart)
            alike.setdefault((name, *same), []).append(record)
    return [(key[0], _scaling(each)) for key, each in alike.items() if len({one.world_size for one in each}) > 1]


def _scaling(records: Sequence[RunRecord]) -> Columns:
    """A row for each number of devices, way to train together, and batch."""
    rows: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.world_size):
        settings = fixed_settings(record)
        how = "" if record.world_size == 1 else settings.get("trainer.strategy", "")
        batch = [value for name, value in settings.items() if name.endswith("batch_size")]
        rows.setdefault((record.world_size, how, *batch), []).append(record)
    base = next((each for key, each in rows.items() if key[0] == 1), [])

    def efficiency(record: RunRecord) -> float | None:
        """Samples a second over as many times those of one device, of the same seed and round where there is one."""
        same = [one for one in base if (one.seed, one.round) == (record.seed, record.round)] or base
        rates = [rate for one in same if (rate := one.samples_per_second)]
        rate = record.samples_per_second
        return rate / record.world_size / statistics.median(rates) if rate and rates else None

    def over(figure: Callable[[RunRecord], float | None]) -> list[str]:
        return [estimated(estimate([figure(one) for one in each])) for each in rows.values()]

    columns = {
        "arm": [f"{key[0]} device{'s' if key[0] > 1 else ''} {key[1]}".strip() for key in rows],
        "runs": [str(len(each)) for each in rows.values()],
        "samples a step": over(lambda one: one.samples_per_step),
        "samples/s": over(lambda one: one.samples_per_second),
        "efficiency": over(efficiency),
    }
    return kept(columns)
