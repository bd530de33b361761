"""The report: comparisons as one self-contained HTML page, for ``python -m scripts.report RUNS -o report.html``.

Nothing is loaded from anywhere and no script runs: pictures are inline SVG whose colours follow the reader's choice of
light or dark, tables scroll inside their own box. Everything that comes from a record is escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from trainer.report.comparison import WorkloadComparison
from trainer.report.pictures import PALETTE, PICTURES, arm_colours, drawing
from trainer.report.scaling import Scaling
from trainer.report.statistics import FASTER, rounded
from trainer.report.tables import ABSENT, NOT_SURE, TEXT_COLUMNS, Columns, footnotes, remarks, tables_of
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_EVENTS = 40
"""Different events of a workload that are listed."""
PROSE = ("reason", "source line", "folder", "value")
"""Columns whose texts are broken into lines."""
WORDS = {
    "arm": "a list of strategies with their options; one of them, usually eager, is what the others are compared with",
    "steady step": "a step after the warm-up during which nothing was compiled; only these make speeds and step times",
    "warm-up": "everything before the steps are steady, compiling included",
    "cold, warm": "starts with empty compile caches, and with what a cold run left there",
    "speed": "the baseline's time of a step over the arm's: 2x is twice as fast. No difference is shown (~) where its "
    "95% interval holds 1, or the runs of one arm are as far apart as the arms",
    "total time": "start-up, warm-up and N steps; validation and checkpoints are left out",
    "pays back": "the step after which an arm has made up for its warm-up",
}
"""What a reader meets on the page, in the words of the tables."""
PATH = re.compile(r"(?<![\w.~:/-])(?:/[^\s/'\",:;()<>|]+)+/(?=[^\s/])")
PACKAGES = re.compile(r"[^\s'\"=]*/(?:site|dist)-packages/")
VARIABLES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}
"""The CSS variable of each light colour."""


def render(
    comparisons: Sequence[WorkloadComparison], *, title: str, command: str, scalings: Sequence[Scaling] = ()
) -> str:
    """The page.

    Args:
        comparisons: What it shows, a section each.
        title: Its heading.
        command: What makes it again.
        scalings: Trainings among them on several numbers of devices, a section each.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    palette = arm_colours(comparisons)
    records = [record for one in comparisons for record in _records(one)]
    days = sorted({record.started[:10] for record in records if record.started})
    facts = [counted(len(comparisons), "workload"), counted(len(records), "run")]
    facts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    sections = "\n".join(_section(one, place, palette) for place, one in enumerate(comparisons))
    sections += "\n".join(_scaling(one, place) for place, one in enumerate(scalings))
    cards = "".join(_card(one, place) for place, one in enumerate(comparisons))
    words = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(text)}</dd></div>" for word, text in WORDS.items())
    light, dark = (" ".join(f"--{name}: {pair[place]};" for name, pair in PALETTE.items()) for place in (0, 1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
{resources.files("trainer.report").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="quiet">{escape(" · ".join(facts))}</p>
<ul class="cards">{cards}</ul>
<dl class="words">{words}</dl>
</header>
{sections}
<section id="about">
<h2>This page again</h2>
<pre><code>{_text(command)}</code></pre>
<p class="quiet">Add <code>--pictures DIR</code> for its pictures as PNG.</p>
</section>
</main>
</body>
</html>
"""


def counted(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def headline(comparison: WorkloadComparison) -> tuple[str, str]:
    """The verdict's number, and what it is of: speed, interval, from which step on, over how many runs."""
    rows = {row.cell.arm: (row, row.ratio) for row in comparison.rows if row.ratio is not None}
    if not rows or comparison.verdict.startswith("no verdict"):
        return "", ""
    faster = [arm for arm, (_, ratio) in rows.items() if ratio.verdict == FASTER]
    last = [one.arm for one in comparison.crossings if one.start == "cold" and one.arm in faster][-1:]
    best = (last or sorted(faster or rows, key=lambda arm: -rows[arm][1].value))[0]
    row, ratio = rows[best]
    number = f"{ratio.value:.2f}x"
    speed = f"the speed of {comparison.baseline}"
    if ratio.low is None or ratio.high is None:
        return number, f"{speed} in single runs, with {best}: repeats would show whether that is more than noise"
    over = f"95% interval {ratio.low:.2f} to {min(ratio.high, 99):.2f}, {counted(len(row.cell.finished), 'run')}"
    if not ratio.shown:
        return f"{NOT_SURE}{number}", f"{speed}, with {best} ({over}): no difference is shown"
    pays = ""
    if row.break_even_steps is not None and row.break_even_steps < math.inf:
        pays = f", which pays back after {rounded(row.break_even_steps)} {comparison.unit}"
    return number, f"{speed}, with {best} ({over}){pays}"


def _card(comparison: WorkloadComparison, place: int) -> str:
    """The workload with its verdict, which stands nowhere else."""
    number, words = headline(comparison)
    shown = f'<p class="headline"><b>{number}</b> <span>{_breakable(words)}.</span></p>\n' if number else ""
    return (
        f'<li><a href="#workload-{place + 1}">{_breakable(comparison.workload)}</a>\n{shown}'
        f'<p class="verdict">{_breakable(_sentence(comparison.verdict))}</p></li>\n'
    )


def _section(comparison: WorkloadComparison, place: int, palette: Mapping[str, str]) -> str:
    figures, absent = "", []
    for picture in PICTURES:
        drawn = picture.draw(comparison, palette=palette)
        if drawn is None:
            absent.append(picture.title.lower())
            continue
        name = f"w{place + 1}-{picture.name}"
        about = f"{picture.caption} {_sentence(comparison.verdict)} The figures are in the table below."
        body = svg(drawn, name, _text(f"{picture.title}: {comparison.workload}"), _text(about))
        whole = picture.name == "crossing"  # two columns wide; on a phone it scrolls inside its box
        body = f'<div class="scroll" tabindex="0">{body}</div>' if whole else body
        kind = ' class="whole"' if whole else ""
        figures += f'<figure{kind} id="{name}">\n{body}\n'
        figures += f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>\n"
    records = _records(comparison)
    facts = {
        "run": _all(["inference" if comparison.run == "inference" else "training"]),
        "device": comparison.device,
        "processes": _all(str(record.world_size) for record in records),
        "precision": _all(record.precision for record in records),
        "matrix products in": _all(record.matrix_precision for record in records),
        "commit": _all(record.git_commit for record in records),
        "seeds": _all(str(record.seed) for record in records),
        "started": _all((record.started or "")[:10] or None for record in records),
    }
    for name in dict.fromkeys(name for record in records for name in record.versions):
        facts[name] = _all(record.versions.get(name) for record in records)
    commands = "".join(
        f"<p>{_breakable(row.cell.arm)}</p>\n<pre><code>{_text(row.cell.command)}</code></pre>\n"
        for row in comparison.rows
    )
    tables = "".join(_table(columns, palette) for columns in tables_of(comparison))
    tables += "".join(f'<p class="quiet">{escape(line)}</p>' for line in footnotes([comparison]))
    items = "".join(f"<li>{_text(line)}</li>" for line in remarks(comparison))
    notes = f'<h3>Remarks</h3><ul class="quiet">{items}</ul>' if items else ""
    unlike = '<p class="warning"><strong>These runs are unlike: compare with care.</strong></p>\n'
    return f"""<section id="workload-{place + 1}">
<h2>{_breakable(comparison.workload)}</h2>
{unlike if comparison.unlike else ""}<div class="figures">
{figures}</div>
{f'<p class="quiet">Not measured: {escape(", ".join(absent))}.</p>' if absent else ""}
<h3>All figures</h3>
{tables}
{notes}
{_part("Graph breaks and recompiles", _events(comparison))}
{_part("Runs that did not finish", _failed(comparison))}
{_part("Conditions", {"what": list(facts), "value": list(facts.values())})}
<h3>Commands</h3>
<details><summary>One for each arm</summary>
{commands}</details>
</section>"""


def _scaling(found: Scaling, place: int) -> str:
    unlike = "".join(f'<p class="quiet">Unlike: {_text(line)}.</p>' for line in found.unlike)
    return f"""<section id="scaling-{place + 1}">
<h2>Scaling: {_breakable(found.name)}</h2>
<p>{_text(_sentence(found.kind))}</p>
{unlike}{_table(found.table)}
</section>"""


def _events(comparison: WorkloadComparison) -> Columns:
    """Breaks, recompiles, fallbacks and skips with reason and source line, alike ones in one row."""
    seen: dict[tuple[str, ...], list[int]] = {}
    for row in comparison.rows:
        for event in (event for run in row.cell.runs for event in run.record.events):
            key = (row.cell.arm, event.kind.replace("_", " "), event.reason, event.location or ABSENT)
            seen.setdefault(key, []).append(event.step or 0)
    listed = list(seen.items())[:MAX_EVENTS]
    columns = {name: [key[at] for key, _ in listed] for at, name in enumerate(("arm", "what", "reason", "source line"))}
    return columns | {
        "first step": [str(min(steps) or ABSENT) for _, steps in listed],
        "times": [f"{len(steps):,}" for _, steps in listed],
    }


def _failed(comparison: WorkloadComparison) -> Columns:
    """Runs that did not finish, with their reasons."""
    failed = [(row.cell.arm, run) for row in comparison.rows for run in row.cell.failed]
    return {
        "arm": [arm for arm, _ in failed],
        "status": [run.record.status.replace("running", "running, or killed") for _, run in failed],
        "reason": [run.record.reason or "no reason in its record" for _, run in failed],
        "folder": [str(run.directory) for _, run in failed],
    }


def _part(title: str, columns: Columns) -> str:
    """A table below its heading; nothing where it has no row."""
    return f"<h3>{title}</h3>\n{_table(columns)}" if next(iter(columns.values())) else ""


def _table(columns: Columns, palette: Mapping[str, str] | None = None) -> str:
    """A table as the terminal shows it; with ``palette`` each arm bears its colour."""
    kinds = ["words" if one in PROSE else "short" if one in (*TEXT_COLUMNS, "what") else "number" for one in columns]
    body = ""
    for first, *texts in zip(*columns.values(), strict=True):
        colour = "" if palette is None else VARIABLES[palette[first]]
        swatch = f'<span class="swatch" style="background:{colour}"></span>' if colour else ""
        cells = "".join(f'<td class="{kind}">{_text(text)}</td>' for text, kind in zip(texts, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{swatch}{_breakable(first)}</th>{cells}</tr>\n'
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )


def _records(comparison: WorkloadComparison) -> list[RunRecord]:
    return [run.record for row in comparison.rows for run in row.cell.runs]


def _all(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value is not None)) or "n/a"


def _breakable(name: str) -> str:
    """Escaped; a line may end after each of the strategies that a name is made of."""
    return _text(name).replace("+", "+<wbr>")


def _text(text: str) -> str:
    """Escaped, and without the folders of the machine on which it was written: a page is passed on."""
    return escape(PATH.sub(".../", PACKAGES.sub("", text)))


def _sentence(words: str) -> str:
    """With a capital and a full stop."""
    return words[:1].upper() + words[1:] + ("." if words and words[-1] not in ".!?" else "")


def svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an SVG element: text as text, colours as CSS variables, no address outside it.

    ``name`` is put before all identifiers, so that several figures fit on one page. ``title`` and ``description`` are
    for a screen reader; both already escaped.
    """
    buffer = io.StringIO()
    with drawing():
        about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=about)
    text = buffer.getvalue()
    opening, _, body = text[text.index("<svg") :].partition(">")
    box = opening.partition('viewBox="')[2].partition('"')[0]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\n?", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r"#([\w-]+)[\")]", body))
    body = re.sub(r' id="([\w.-]+)"', lambda hit: f' id="{name}-{hit[1]}"' if hit[1] in used else "", body)
    body = re.sub(r"(url\(|href=\")#([\w-]+)", rf"\1#{name}-\2", body)
    body = re.sub(r"#[0-9a-f]{6}\b", lambda hit: VARIABLES.get(hit[0], hit[0]), body)
    return (
        f'<svg viewBox="{box}" role="img" aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{title}</title><desc id="{name}-description">{description}</desc>{body}'
    )
