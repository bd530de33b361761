"""The report: comparisons as one self-contained HTML page, for ``python -m scripts.report RUNS -o report.html``.

Nothing is loaded from anywhere and no script runs: pictures are inline SVG whose colours follow the reader's choice of
light or dark, tables scroll inside their own box. Everything that comes from a record is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from trainer.evidence import page_details
from trainer.evidence import pictures_style as style
from trainer.evidence.comparison import WorkloadComparison
from trainer.evidence.page_details import breakable
from trainer.evidence.pictures import PICTURES, Picture, arm_colours, crossing
from trainer.evidence.statistics import FASTER


def render(comparisons: Sequence[WorkloadComparison], *, title: str, command: str) -> str:
    """The page.

    Args:
        comparisons: What it shows, a section each.
        title: Its heading.
        command: What makes it again.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    palette = arm_colours(comparisons)
    runs = [run.record for one in comparisons for row in one.rows for run in row.cell.runs]
    days = sorted({record.started[:10] for record in runs if record.started})
    facts = [page_details.counted(len(comparisons), "workload"), page_details.counted(len(runs), "run")]
    facts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    sections = "\n".join(_section(one, place, palette, command) for place, one in enumerate(comparisons))
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
{resources.files("trainer.evidence").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="quiet">{escape(" · ".join(facts))}</p>
{_cards(comparisons)}</header>
{sections}
<section id="about">
<h2>How to read it</h2>
{ABOUT}
<p>This page again:</p>
<pre><code>{escape(command)}</code></pre>
</section>
</main>
</body>
</html>
"""


ABOUT = """<p>A step is steady when it comes after the warm-up and nothing was compiled during it. Total time counts
start-up, warm-up and compiling, and leaves out validation and checkpoints. A ratio above 1 is faster than the
baseline; where its 95% interval holds 1, or the runs of one arm are as far apart as the arms, no difference is shown
(~). Cold runs start with empty compile caches, warm ones with what a cold run left there. Whatever was not measured is
left out, and said.</p>"""


def _cards(comparisons: Sequence[WorkloadComparison]) -> str:
    """The verdicts; of one workload alone its section says it."""
    if len(comparisons) == 1:
        return ""
    cards = "".join(_card(one, place) for place, one in enumerate(comparisons))
    return f'<ul class="cards">\n{cards}</ul>\n'


def _card(comparison: WorkloadComparison, place: int) -> str:
    ratios = {row.cell.arm: row.ratio for row in comparison.rows if row.ratio is not None}
    faster = {arm: ratio.value for arm, ratio in ratios.items() if ratio.verdict == FASTER}
    facts = [comparison.device]
    if faster:
        best = max(faster, key=lambda arm: faster[arm])
        facts.insert(0, f"fastest steps: {best}, {faster[best]:.2f} times {comparison.baseline}")
    elif ratios:
        facts.insert(0, f"nothing is shown to be faster than {comparison.baseline}")
    told = sentence(" · ".join(facts))
    return (
        f'<li><a href="#workload-{place + 1}">{breakable(comparison.workload)}</a>'
        f'<p class="said">{breakable(sentence(comparison.verdict))}</p>'
        f'<p class="quiet">{breakable(told)}</p></li>\n'
    )


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return words[:1].upper() + words[1:] + ("." if words and words[-1] not in ".!?" else "")


def _section(comparison: WorkloadComparison, place: int, palette: Mapping[str, str], command: str) -> str:
    figures, absent = [], []
    for picture in PICTURES:
        figure = _figure(comparison, place, picture, palette, command)
        if figure is None:
            absent.append(picture.absent)
        else:
            figures.append(figure)
    absent += page_details.not_measured(comparison)
    return f"""<section id="workload-{place + 1}">
<h2>{breakable(comparison.workload)}</h2>
<p class="said">{breakable(sentence(comparison.verdict))}</p>
<p class="quiet">{escape(page_details.where(comparison))}</p>
{page_details.warnings(comparison)}<div class="figures">
{"".join(figures)}</div>
{f'<p class="quiet">Left out: {escape("; ".join(absent))}.</p>' if absent else ""}
{page_details.figures(comparison, palette)}
{page_details.compiler(comparison)}
{page_details.failed(comparison)}
{page_details.remarks(comparison)}
{page_details.conditions(comparison)}
</section>"""


def _figure(
    comparison: WorkloadComparison, place: int, picture: Picture, palette: Mapping[str, str], command: str
) -> str | None:
    drawn = picture.draw(comparison, palette=palette)
    if drawn is None:
        return None
    said = {
        "title": escape(f"{picture.title}: {comparison.workload}"),
        "description": escape(f"{picture.caption} {sentence(comparison.verdict)} The figures are in the table below."),
    }
    name = f"w{place + 1}-{picture.name}"
    body = style.svg(drawn, name=name, **said)
    whole = picture.name == "crossing"
    if whole:
        small = crossing(comparison, palette=palette, narrow=True)
        assert small is not None, "what can be drawn wide can be drawn narrow"
        narrow = style.svg(small, name=f"{name}-narrow", **said)
        body = f'<div class="wide">{body}</div>\n<div class="narrow">{narrow}</div>'
    commands = "\n".join(row.cell.command for row in comparison.rows if row.cell.finished)
    return f"""<figure{' class="whole"' if whole else ""} id="{name}">
{body}
<figcaption>{escape(picture.caption)}</figcaption>
<details><summary>Commands</summary><pre><code>{escape(commands)}</code></pre>
<pre><code>{escape(command)} --pictures pictures  # pictures/*-{picture.name}.png</code></pre></details>
</figure>
"""
