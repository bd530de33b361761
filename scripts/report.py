"""Runs as a page to look at: ``crucible report RUNS -o report.html``

One self-contained HTML file: verdicts, tables, curves of total time that cross where compiling has paid for itself,
losses, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported.
"""

# Nothing is loaded from anywhere and no script runs: pictures are SVG inside the page, tables scroll inside their own
# box. Everything that comes from a record is escaped.

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from scripts.arguments import STEPS_HELP, exit_code, parser, steps
from trainer.report import tables
from trainer.report.comparison import AT_STEPS, WorkloadComparison, compare_runs
from trainer.report.pictures import PICTURES, arm_colours, save
from trainer.report.runs import find
from trainer.report.statistics import FASTER
from trainer.report.tables import Columns
from trainer.telemetry.files import counted, written_whole
from trainer.telemetry.record import RunRecord

EXAMPLES = """\
examples:
  crucible report outputs/sweeps/2026-11-21_12-00-00
  crucible report outputs -o report.html --steps 1000,100000
  crucible report outputs/captioning 'outputs/gpt2/*/*' --baseline regional

RUN is a record file, a run's folder, a folder that holds such folders at any depth, or a glob of these.
Exit codes: 0 written, 2 wrong arguments or no runs.
"""
TITLE = "What compiling costs, and what it gives"
MAX_EVENTS = 40
"""Different events of a workload that are listed."""
SHORT = (*tables.TEXT_COLUMNS, "what")
PROSE = ("reason", "source line")
"""Columns of texts; the latter are broken into lines."""
WORDS = {
    "arm": "a list of strategies with their options; one of them, usually eager, is what the others are compared with",
    "warm-up": "everything before the steps are steady, compiling included; cold: from empty compile caches, warm: "
    "with what a cold run left there",
    "speed": "the baseline's time of a steady step over the arm's: 2x is twice as fast. No difference is shown (~) "
    "where its 95% interval holds 1, or the runs of one arm are as far apart as the arms",
    "pays back": "the step after which an arm has made up for its warm-up",
}
"""What a reader meets on the page, in the words of the tables."""
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
    palette = arm_colours(comparisons)
    records = [record for one in comparisons for record in _records(one)]
    days = sorted({record.started[:10] for record in records if record.started})
    facts = [counted(len(comparisons), "workload"), counted(len(records), "run")]
    facts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    sections = "\n".join(_section(one, place, palette) for place, one in enumerate(comparisons))
    sections += "\n".join(
        f"<section>\n<h2>Scaling: {_breakable(name)}</h2>\n{_table(table)}\n</section>" for name, table in scalings
    )
    cards = "".join(_card(one, place) for place, one in enumerate(comparisons))
    words = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(text)}</dd></div>" for word, text in WORDS.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>
{resources.files("scripts").joinpath("report.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header>
<h1>{TITLE}</h1>
<p class="quiet">{escape(" · ".join(facts))}</p>
<ul class="cards">{cards}</ul>
<dl class="words">{words}</dl>
</header>
{sections}
</main>
</body>
</html>
"""


def _card(comparison: WorkloadComparison, place: int) -> str:
    """The workload with its fastest arm (of those shown to be faster, if any) and its verdict."""
    headline = ""
    rated = [(row.ratio, row.cell) for row in comparison.rows if row.ratio is not None]
    if rated and not comparison.verdict.startswith("no verdict"):
        ratio, cell = max(rated, key=lambda each: (each[0].verdict == FASTER, each[0].value))
        over = f"95% interval {tables.interval(ratio)}, " if tables.interval(ratio) else ""
        words = f"the speed of {comparison.baseline}, with {cell.arm} ({over}{counted(len(cell.finished), 'run')})."
        headline = f'<p class="headline"><b>{tables.marked(ratio)}</b> <span>{_breakable(words)}</span></p>\n'
    verdict = comparison.verdict[:1].upper() + comparison.verdict[1:]
    verdict += "." * (verdict[-1] not in ".!?")
    return (
        f'<li><a href="#workload-{place + 1}">{_breakable(comparison.workload)}</a>\n{headline}'
        f'<p class="verdict">{_breakable(verdict)}</p></li>\n'
    )


def _section(comparison: WorkloadComparison, place: int, palette: Mapping[str, str]) -> str:
    figures = ""
    for name, (draw, caption) in PICTURES.items():
        if (drawn := draw(comparison, palette)) is None:
            continue
        buffer = io.BytesIO()
        save(drawn, buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
        source = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        about = _text(f"{name}: {comparison.workload}. The figures are in the tables below.")
        figures += f'<figure id="w{place + 1}-{name}">\n<img src="{source}" alt="{about}">\n'
        figures += f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
    records = _records(comparison)
    conditions = [
        tables.conditions_of(records),
        *dict.fromkeys(record.precision for record in records if record.precision),
        f"seeds {', '.join(dict.fromkeys(str(record.seed) for record in records))}",
    ]
    commands = "".join(
        f"<p>{_breakable(row.cell.arm)}</p>\n<pre><code>{_text(row.cell.command)}</code></pre>\n"
        for row in comparison.rows
    )
    notes = [*tables.remarks(comparison), *tables.footnotes([comparison])]
    items = "".join(f"<li>{_text(line)}</li>" for line in notes)
    unlike = '<p class="warning"><strong>These runs are unlike: compare with care.</strong></p>\n'
    return f"""<section id="workload-{place + 1}">
<h2>{_breakable(comparison.workload)}</h2>
{unlike if comparison.unlike else ""}{_table(tables.decision(comparison), palette)}
{f'<ul class="quiet">{items}</ul>' if items else ""}
<div class="figures">
{figures}</div>
{_part("Other figures", tables.all_figures(comparison))}
{_part("Graph breaks and recompiles", _events(comparison))}
<p class="quiet">{_text(" · ".join(conditions))}</p>
<details><summary>Commands, one for each arm</summary>
{commands}</details>
</section>"""


def _events(comparison: WorkloadComparison) -> Columns:
    """Breaks, recompiles, fallbacks and skips with reason and source line, alike ones in one row."""
    seen: dict[tuple[str, ...], list[int]] = {}
    for row in comparison.rows:
        for event in (event for run in row.cell.runs for event in run.record.events):
            key = (row.cell.arm, event.kind.replace("_", " "), event.reason, event.location or tables.ABSENT)
            seen.setdefault(key, []).append(event.step or 0)
    listed = list(seen.items())[:MAX_EVENTS]
    columns = {name: [key[at] for key, _ in listed] for at, name in enumerate(("arm", "what", "reason", "source line"))}
    return columns | {
        "first step": [str(min(steps) or tables.ABSENT) for _, steps in listed],
        "times": [f"{len(steps):,}" for _, steps in listed],
    }


def _part(title: str, columns: Columns) -> str:
    """A table below its heading; nothing where it has no row, or no figure."""
    return f"<h3>{title}</h3>\n{_table(columns)}" if len(columns) > 1 and next(iter(columns.values())) else ""


def _table(columns: Columns, palette: Mapping[str, str] | None = None) -> str:
    """A table as the terminal shows it; with ``palette`` each arm bears its colour."""
    kinds = ["words" if one in PROSE else "short" if one in SHORT else "number" for one in columns]
    body = ""
    for first, *texts in zip(*columns.values(), strict=True):
        swatch = f'<span class="swatch" style="background:{palette[first]}"></span>' if palette else ""
        cells = "".join(f'<td class="{kind}">{_text(text)}</td>' for text, kind in zip(texts, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{swatch}{_breakable(first)}</th>{cells}</tr>\n'
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )


def _records(comparison: WorkloadComparison) -> list[RunRecord]:
    return [run.record for row in comparison.rows for run in row.cell.runs]


def _breakable(name: str) -> str:
    """Escaped; a line may end after each of the strategies that a name is made of."""
    return _text(name).replace("+", "+<wbr>")


def _text(text: str) -> str:
    """Escaped, and without the folders of the machine on which it was written: a page is passed on."""
    return escape(PATH.sub(".../", PACKAGES.sub("", text)))


if __name__ == "__main__":
    sys.exit(main())
