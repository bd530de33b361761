"""Runs as a page to look at: ``crucible report RUNS -o report.html``

One self-contained HTML file: verdicts, tables, curves of total time that cross where compiling has paid for itself,
losses, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported. For whoever
has compared and shows it to others.
"""

# Nothing is loaded from anywhere and no script runs: pictures are SVG inside the page, tables scroll inside their own
# box. ``report.html`` is its template, in which everything but the page's own marks is escaped.

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from scripts.arguments import STEPS_HELP, exit_code, parser, steps
from trainer.report import tables
from trainer.report.comparison import AT_STEPS, WorkloadComparison, compare_runs
from trainer.report.pictures import PICTURES, arm_colours, save
from trainer.report.runs import find
from trainer.report.statistics import FASTER, best_at
from trainer.report.tables import Columns
from trainer.telemetry.record import RunRecord
from trainer.telemetry.serialization import written_whole
from trainer.wording import counted

EXAMPLES = """\
examples:
  crucible report outputs/sweeps/2026-11-21_12-00-00
  crucible report outputs -o report.html --steps 1000,100000
  crucible report outputs/captioning 'outputs/gpt2/*/*' --baseline regional

RUN is a record file, a run's folder, a folder that holds such folders at any depth, or a glob of these.
Exit codes: 0 written, 2 wrong arguments or no runs.
"""
MAX_EVENTS = 40
"""Different events of a workload that are listed."""
SHORT = (*tables.TEXT_COLUMNS, "what")
PROSE = ("reason", "source line")
"""Columns of texts; the latter are broken into lines."""
PATH = re.compile(r"(?<![\w.~:/-])(?:/[^\s/'\",:;()<>|]+)+/(?=[^\s/])")
PACKAGES = re.compile(r"[^\s'\"=]*/(?:site|dist)-packages/")


def main(arguments: list[str] | None = None) -> int:
    made = parser("report", __doc__ or "", EXAMPLES)
    add = made.add_argument
    add("runs", nargs="*", metavar="RUN", default=["outputs"], help="see below (default: outputs)")
    add("-o", "--output", default="report.html", metavar="FILE", help="the page (default: %(default)s)")
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: %(default)s)")
    add("--steps", type=steps, default=AT_STEPS, metavar="N,N", help=STEPS_HELP)
    options = made.parse_args(arguments)
    return exit_code(lambda _: report(options), place=options.output)


def report(options: argparse.Namespace) -> int:
    runs = find(options.runs, unreadable=lambda reason: print(f"warning: left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    text = render(comparisons, tables.scalings(runs))
    with written_whole(Path(options.output), "w") as file:
        file.write(text)
    counts = f"{counted(len(comparisons), 'workload')}, {counted(len(runs), 'run')}"
    print(f"{options.output}: {counts}, {len(text) / 1024:,.0f} KiB")
    return 0


def render(comparisons: Sequence[WorkloadComparison], scalings: Sequence[tuple[str, Columns]] = ()) -> str:
    """The page: a section for each comparison, and for each training on several numbers of devices among them.

    Raises ValueError where Matplotlib is not installed.
    """
    from jinja2 import Environment, FileSystemLoader  # which torch brings along

    palette = arm_colours(comparisons)
    records = [record for one in comparisons for record in _records(one)]
    days = sorted({record.started[:10] for record in records if record.started})
    facts = [counted(len(comparisons), "workload"), counted(len(records), "run")]
    facts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=_clean, keep_trailing_newline=True
    )
    made.filters["breakable"] = _breakable
    return made.get_template("report.html").render(
        facts=facts,
        comparisons=comparisons,
        scalings=scalings,
        palette=palette,
        tables=tables,
        headline=_headline,
        pictures=partial(_pictures, palette=palette),
        events=_events,
        conditions=_conditions,
        rows=lambda columns: list(zip(*columns.values(), strict=True)),
        kind=lambda name: "words" if name in PROSE else "short" if name in SHORT else "number",
    )


def _headline(comparison: WorkloadComparison) -> tuple[str, str] | None:
    """How many times as fast the arm is that the verdict advises for the longest training of the tables, and what that
    is; where it advises none, the fastest arm (of those shown to be faster, if any). None where nobody can tell, as
    from single runs, which have no interval."""
    rated = [(row.ratio, row.cell) for row in comparison.rows if row.ratio is not None]
    rated = [(ratio, cell) for ratio, cell in rated if ratio.low is not None]
    if not rated or comparison.busy is not None:
        return None
    longest = max((steps for row in comparison.rows for steps in row.total_seconds), default=AT_STEPS[-1])
    advised = best_at(comparison.crossings, longest) if comparison.crossings else None
    ratio, cell = max(rated, key=lambda each: (each[1].arm == advised, each[0].verdict == FASTER, each[0].value))
    over = f"95% interval {tables.interval(ratio)}, " if tables.interval(ratio) else ""
    words = f"the speed of {comparison.baseline}, with {cell.arm} ({over}{counted(len(cell.finished), 'run')})."
    return tables.marked(ratio), words


def _pictures(comparison: WorkloadComparison, palette: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Name, address and caption of each picture that there is."""
    for name, (draw, caption) in PICTURES.items():
        if (drawn := draw(comparison, palette)) is not None:
            buffer = io.BytesIO()
            save(drawn, buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
            yield name, f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}", caption


def _conditions(comparison: WorkloadComparison) -> list[str]:
    records = _records(comparison)
    precisions = dict.fromkeys(record.precision for record in records if record.precision)
    seeds = ", ".join(dict.fromkeys(str(record.seed) for record in records))
    return [tables.conditions_of(records), *precisions, f"seeds {seeds}"]


def _events(comparison: WorkloadComparison) -> Columns:
    """Breaks, recompiles, fallbacks and skips with reason and source line, alike ones in one row."""
    seen: dict[tuple[str, ...], list[int]] = {}
    for row in comparison.rows:
        for event in (event for run in row.cell.runs for event in run.record.events):
            what = event.kind.replace("_", " ") + (f", {event.phase}" if event.phase != "training" else "")
            key = (row.cell.arm, what, event.reason, event.location or tables.ABSENT)
            seen.setdefault(key, []).append(event.step or 0)
    listed = list(seen.items())[:MAX_EVENTS]
    columns = {name: [key[at] for key, _ in listed] for at, name in enumerate(("arm", "what", "reason", "source line"))}
    return columns | {
        "first step": [str(min(steps) or tables.ABSENT) for _, steps in listed],
        "times": [f"{len(steps):,}" for _, steps in listed],
    }


def _records(comparison: WorkloadComparison) -> list[RunRecord]:
    return [run.record for row in comparison.rows for run in row.cell.runs]


def _breakable(name: str) -> Markup:
    """A line may end after each of the strategies that a name is made of."""
    return Markup(str(_clean(name)).replace("+", "+<wbr>"))


def _clean(value: Any) -> Markup:
    """Escaped, and without the folders of the machine on which it was written: a page is passed on."""
    return value if isinstance(value, Markup) else Markup(escape(PATH.sub(".../", PACKAGES.sub("", str(value)))))


if __name__ == "__main__":
    sys.exit(main())
