"""The report: comparisons as one self-contained HTML page, for ``python -m scripts.report RUNS -o report.html``.

Nothing is loaded from anywhere and no script runs: pictures are inline SVG whose colours follow the reader's choice of
light or dark, tables scroll inside their own box. Everything that comes from a record is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from trainer.report.comparison import WorkloadComparison
from trainer.report.pictures import PICTURES, Picture, arm_colours, style
from trainer.report.scaling import Scaling
from trainer.report.statistics import FASTER, rounded
from trainer.report.tables import NOT_SURE, TEXT_COLUMNS, footnotes, tables_of
from trainer.telemetry.record import Event, RunRecord

MAX_EVENTS = 40
"""Different events of a workload that are listed."""
KINDS = {
    "graph_break": "graph break",
    "recompile": "recompile",
    "fallback": "fallback",
    "cudagraph_skip": "CUDA graph skipped",
}
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
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; {style.variables(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {style.variables(dark=True)} }} }}
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
    figures, absent = [], []
    for picture in PICTURES:
        figure = _figure(comparison, place, picture, palette)
        if figure is None:
            absent.append(picture.absent)
        else:
            figures.append(figure)
    rows = [row for row in comparison.rows if row.cell.finished]
    if not any(row.cell.warm for row in rows) and any(row.cell.compiles for row in rows):
        absent.append("warm starts: none among the runs")
    records = _records(comparison)
    versions = [f"{name} {version}" for name, version in comparison.versions.items()]
    precisions = sorted({record.precision for record in records if record.precision})
    kind = "inference" if comparison.run == "inference" else "training"
    where = " · ".join([kind, comparison.device, *precisions, *versions, counted(len(records), "run")])
    unlike = "".join(f"<li>{_text(line)}</li>" for line in comparison.unlike)
    if unlike:
        unlike = (
            f'<div class="warning"><strong>These runs are unlike: compare with care.</strong><ul>{unlike}</ul></div>\n'
        )
    return f"""<section id="workload-{place + 1}">
<h2>{_breakable(comparison.workload)}</h2>
<p class="quiet">{_text(where)}</p>
{unlike}<div class="figures">
{"".join(figures)}</div>
{f'<p class="quiet">Left out: {escape("; ".join(absent))}.</p>' if absent else ""}
{_all_figures(comparison, palette)}
{_events(comparison)}
{_failed(comparison)}
{_remarks(comparison)}
{_conditions(comparison)}
</section>"""


def _figure(comparison: WorkloadComparison, place: int, picture: Picture, palette: Mapping[str, str]) -> str | None:
    drawn = picture.draw(comparison, palette=palette)
    if drawn is None:
        return None
    name = f"w{place + 1}-{picture.name}"
    body = style.svg(
        drawn,
        name=name,
        title=_text(f"{picture.title}: {comparison.workload}"),
        description=_text(f"{picture.caption} {_sentence(comparison.verdict)} The figures are in the table below."),
    )
    whole = picture.name == "crossing"  # two columns wide; on a phone it scrolls inside its box
    if whole:
        body = f'<div class="scroll" tabindex="0">{body}</div>'
    return f"""<figure{' class="whole"' if whole else ""} id="{name}">
{body}
<figcaption>{escape(picture.caption)}</figcaption>
</figure>
"""


def _scaling(found: Scaling, place: int) -> str:
    unlike = "".join(f'<p class="quiet">Unlike: {_text(line)}.</p>' for line in found.unlike)
    return f"""<section id="scaling-{place + 1}">
<h2>Scaling: {_breakable(found.name)}</h2>
<p>{_text(_sentence(found.kind))}</p>
{unlike}{_figures(found.table)}
</section>"""


def _figures(columns: Mapping[str, Sequence[str]], palette: Mapping[str, str] | None = None) -> str:
    """A table as the terminal shows it; with ``palette`` each arm bears its colour."""
    kinds = ["short" if heading in TEXT_COLUMNS else "number" for heading in columns]
    body = ""
    for arm, *texts in zip(*columns.values(), strict=True):
        colour = "" if palette is None else style.variable(palette[arm])
        swatch = f'<span class="swatch" style="background:{colour}"></span>' if colour else ""
        cells = "".join(f'<td class="{kind}">{_text(text)}</td>' for text, kind in zip(texts, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{swatch}{_breakable(arm)}</th>{cells}</tr>\n'
    return _table(zip(columns, kinds, strict=True), body)


def _all_figures(comparison: WorkloadComparison, palette: Mapping[str, str]) -> str:
    """The tables that the terminal shows."""
    shown = "".join(_figures(columns, palette) for columns in tables_of(comparison))
    notes = "".join(f'<p class="quiet">{escape(line)}</p>' for line in footnotes([comparison]))
    return f"<h3>All figures</h3>\n{shown}{notes}"


def _events(comparison: WorkloadComparison) -> str:
    """Breaks, recompiles, fallbacks and skips with reason and source line, alike ones in one row."""
    seen: dict[tuple[str, str, str, str], list[Event]] = {}
    for row in comparison.rows:
        for event in (event for run in row.cell.runs for event in run.record.events):
            seen.setdefault((row.cell.arm, event.kind, event.reason, event.location or "-"), []).append(event)
    if not seen:
        compiled = any(record.graphs is not None for record in _records(comparison))
        text = "None in any of the runs that compiled." if compiled else "Nothing was compiled."
        return f'<h3>Graph breaks and recompiles</h3>\n<p class="quiet">{text}</p>'
    body = ""
    for (arm, kind, reason, location), events in list(seen.items())[:MAX_EVENTS]:
        steps = sorted({event.step for event in events if event.step is not None})
        when = " to ".join(dict.fromkeys(f"{step:,}" for step in (steps[0], steps[-1]))) if steps else ""
        phases = sorted({event.phase for event in events} - {"training"})
        when = " ".join([when, *phases]).strip() or "-"
        body += (
            f'<tr><th scope="row">{_breakable(arm)}</th><td>{escape(KINDS.get(kind, kind))}</td>'
            f'<td class="words">{_text(reason)}</td><td class="words"><code>{_text(location)}</code></td>'
            f'<td class="number">{escape(when)}</td><td class="number">{len(events):,}</td></tr>\n'
        )
    head = [("arm", ""), ("what", ""), ("reason", ""), ("source line", ""), ("step", "number"), ("times", "number")]
    more = len(seen) - MAX_EVENTS
    rest = f'<p class="quiet">{more:,} more are in the records.</p>' if more > 0 else ""
    return f"<h3>Graph breaks and recompiles</h3>\n{_table(head, body)}{rest}"


def _failed(comparison: WorkloadComparison) -> str:
    """Runs that did not finish, with their reasons; nothing where all did."""
    body = ""
    for row in comparison.rows:
        for run in row.cell.failed:
            status = "running, or killed" if run.record.status == "running" else run.record.status
            body += (
                f'<tr><th scope="row">{_breakable(row.cell.arm)}</th><td>{escape(status)}</td>'
                f'<td class="words">{_text(run.record.reason or "no reason in its record")}</td>'
                f'<td class="words"><code>{_text(str(run.directory))}</code></td></tr>\n'
            )
    head = [(name, "") for name in ("arm", "status", "reason", "folder")]
    return f"<h3>Runs that did not finish</h3>\n{_table(head, body)}" if body else ""


def _remarks(comparison: WorkloadComparison) -> str:
    """What a reader must know of single rows, and differences between the runs that need not matter."""
    flags: dict[str, list[str]] = {}
    for row in comparison.rows:
        for flag in row.flags if row.cell.finished else []:
            flags.setdefault(flag, []).append(row.cell.arm)
    items = "".join(f"<li><b>{_breakable(', '.join(arms))}</b>: {_text(flag)}</li>" for flag, arms in flags.items())
    items += "".join(f"<li>{_text(note)}</li>" for note in comparison.notes)
    return f'<h3>Remarks</h3>\n<ul class="quiet">{items}</ul>' if items else ""


def _conditions(comparison: WorkloadComparison) -> str:
    """Device, versions, precision and commit of the runs, and a command for each arm."""
    records = _records(comparison)
    names = dict.fromkeys(name for record in records for name in record.versions)
    versions = {name: _all(record.versions.get(name) for record in records) for name in names}
    facts = {
        "device": _all(record.device for record in records),
        "processes": _all(str(record.world_size) for record in records),
        "precision": _all(record.precision for record in records),
        "matrix products in": _all(record.matrix_precision for record in records),
        "commit": _all(record.git_commit for record in records),
        "seeds": _all(str(record.seed) for record in records),
        "started": _all((record.started or "")[:10] or None for record in records),
        "versions": " · ".join(f"{name} {version}" for name, version in versions.items()) or "n/a",
    }
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="words">{_text(value)}</td></tr>\n'
        for name, value in facts.items()
    )
    commands = "".join(
        f"<p>{_breakable(row.cell.arm)}</p>\n<pre><code>{_text(row.cell.command)}</code></pre>\n"
        for row in comparison.rows
    )
    return (
        f'<h3>Conditions</h3>\n<div class="scroll"><table><tbody>{body}</tbody></table></div>\n'
        f"<h3>Commands</h3>\n<details><summary>One for each arm</summary>\n{commands}</details>"
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


def _table(columns: Iterable[tuple[str, str]], body: str) -> str:
    """Headings with the class of each, and rows."""
    head = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in columns)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )
