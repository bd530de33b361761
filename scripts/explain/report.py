"""Report: an explanation as rich prints it, problems first, and as one HTML page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from rich import markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.explain.explanation import Break, Coverage, Explanation, Recompile
from trainer.telemetry.source import Line, shown

MAX_CHANGES, MAX_CHANGES_OF_PAGE = 4, 10
"""Changes of one value that are shown."""
MAX_SHARES = 12
GRAPH_COLUMNS = ("region", "copies", "forward", "backward", "val", "ops", "breaks", "recompiles")
STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #888; --bad: #c62828; --warn: #b26a00; --good: #2e7d32;
  --card: #8881; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --warn: #ffcc80; --good: #a5d6a7; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { font-size: 1.15rem; font-weight: 600; } .bad { color: var(--bad); } .warn { color: var(--warn); }
.good { color: var(--good); } .soft { color: var(--soft); }
.card { background: var(--card); border-left: 4px solid var(--bad); border-radius: 4px; margin: 1rem 0;
  padding: .6rem 1rem; } .card.warn-card { border-color: var(--warn); }
.card h3 { margin: 0 0 .3rem; font-size: 1rem; } .card p { margin: .3rem 0; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { margin: .3rem 0; overflow-x: auto; padding: .4rem .6rem;
  background: var(--card); border-radius: 4px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); } th { font-weight: 600; color: var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { display: flex; height: 1.4rem; border-radius: 4px; overflow: hidden; margin: .6rem 0; }
.bar span { min-width: 1px; } .scroll { overflow-x: auto; }
"""
COLOURS = {"compiled": ("#2e7d32", "#43a047", "#66bb6a"), "eager": ("#e65100", "#f57c00", "#ffb74d", "#ffcc80")}
"""Of the bar's pieces, largest first; they repeat."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print everything that a reader needs; JSON and the page hold the rest."""
    console.print(heading(explanation), markup=False)
    for number, failure in enumerate(explanation.failures, 1):
        console.print(f"\n[red bold]does not compile {number}[/]: {markup.escape(failure)}")
    for number, one in enumerate(explanation.breaks, 1):
        console.print(f"\n[red bold]graph break {number}[/]: {markup.escape(_title(one))}")
        _print_details(one, console)
    for number, recompile in enumerate(explanation.unexpected, 1):
        console.print(f"\n[yellow bold]recompile {number}[/]: {markup.escape(_title(recompile))}")
        _print_details(recompile, console)
    console.print()
    if explanation.graphs:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in GRAPH_COLUMNS:
            table.add_column(name, justify="left" if name == "region" else "right", overflow="fold")
        for row in _graph_rows(explanation):
            table.add_row(*map(markup.escape, row))
        console.print(table)
    if explanation.coverage is not None:
        console.print(_coverage_table(explanation.coverage))
    for line in (*lines_at_the_end(explanation), *(f"{name}: {file}" for name, file in explanation.files.items())):
        console.print(line, markup=False)
    console.print(f"[bold]{markup.escape(verdict(explanation))}[/]")


def heading(explanation: Explanation) -> str:
    """What was looked at, in two lines."""
    kinds = len(explanation.batch_kinds)
    stopped = f" (not the whole epoch: {explanation.stopped})" if explanation.stopped else ""
    return (
        f"{explanation.task} under {explanation.strategies}, backend {explanation.backend or 'n/a'}, "
        f"torch {explanation.versions.get('torch') or 'n/a'} on {explanation.device or 'n/a'}\n"
        f"{explanation.batches:,} batches looked at, {explanation.batches_run:,} run, {_count(kinds, 'kind')}{stopped}"
    )


def verdict(explanation: Explanation) -> str:
    """The last line."""
    if not explanation.problems:
        return "nothing wrong: no graph breaks, no recompiles"
    counts = (
        (len(explanation.breaks), "graph break"),
        (sum(recompile.count for recompile in explanation.unexpected), "recompile"),
        (len(explanation.failures), "failure"),
    )
    return ", ".join(_count(number, name) for number, name in counts if number)


def lines_at_the_end(explanation: Explanation) -> Iterator[str]:
    """Kernels, what is expected, notes, what was left out."""
    kernels = explanation.kernels
    if kernels is not None:
        yield (
            f"kernels: {kernels.nodes_before_fusion:,} operations became {kernels.generated:,} generated kernels and "
            f"{kernels.external_calls:,} library calls"
        )
        if kernels.cudagraph_skips is not None:
            yield f"CUDA graphs: {f'{kernels.cudagraph_skips} graphs' if kernels.cudagraph_skips else 'none'} left out"
            yield from (f"  {reason}" for reason in kernels.cudagraph_reasons)
    expected = sum(recompile.count for recompile in explanation.recompiles if recompile.expected)
    if expected:
        yield (
            f"expected: {expected} more {'graph' if expected == 1 else 'graphs'} (validation, copies of other sizes, "
            "shapes compiled beforehand), which torch counts as recompiles"
        )
    yield from (f"note: {note}" for note in explanation.notes)
    yield from (f"not looked at: {each}" for each in explanation.not_looked_at)


def page(explanation: Explanation, folder: Path | None = None) -> str:
    """The whole document, to lie in ``folder`` (None = the working directory), from which its links lead."""
    title = f"{explanation.task} under {explanation.strategies}"
    tone = "bad" if explanation.problems else "good"
    body = [
        f"<h1>Why: {escape(title)}</h1>",
        *(f"<p class=soft>{escape(line)}</p>" for line in heading(explanation).splitlines()),
        f"<p class='verdict {tone}'>{escape(verdict(explanation))}</p>",
        *_section("Does not compile", [f"<pre>{escape(each)}</pre>" for each in explanation.failures]),
        *_section("Graph breaks", [_card(number, each) for number, each in enumerate(explanation.breaks, 1)]),
        *_section("Recompiles", [_card(number, each) for number, each in enumerate(explanation.unexpected, 1)]),
        *_section("Graphs", [_table(GRAPH_COLUMNS, _graph_rows(explanation), text={0})] if explanation.graphs else []),
        *_section("Time of a step", _coverage_bar(explanation.coverage) if explanation.coverage else []),
        *_section("Batches of the epoch", [_batches(explanation)] if explanation.batch_kinds else []),
        *_section("Also", [f"<p>{escape(line)}</p>" for line in lines_at_the_end(explanation)]),
        *_section("Files", list(_links(explanation, folder or Path.cwd()))),
    ]
    if explanation.command:
        body.append(f"<p class=soft><code>python -m scripts.explain {escape(' '.join(explanation.command))}</code></p>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _title(one: Break | Recompile) -> str:
    name = f" ({one.identifier})" if isinstance(one, Break) and one.identifier else ""
    return f"{one.kind}{name}" + ("" if one.count == 1 else f", {one.count} times")


def _details(one: Break | Recompile, max_changes: int) -> Iterator[tuple[str, str]]:
    """What there is to read about a problem, each with what it is: a line of code, its text, a remark, a heading."""
    yield from _line(one.where)
    if isinstance(one, Break):
        if one.inside is not None:
            yield "remark", f"which reaches {_place(one.inside)}"
        if one.called_from is not None:
            yield "remark", "called from"
            yield from _line(one.called_from)
    if one.region:
        yield "remark", f"in region {one.region}"
    if isinstance(one, Break):
        yield "why", one.reason
    else:
        more = len(one.changes) - max_changes
        changes = "; ".join([*one.changes[:max_changes], *([f"{more} more"] if more > 0 else [])])
        yield "what", f"{one.what}: {changes}" if changes else one.what
    yield "fix", one.fix
    if isinstance(one, Recompile) and one.guard != one.what:
        yield "guard", one.guard


def _line(line: Line | None) -> Iterator[tuple[str, str]]:
    if line is not None:
        yield "line", _place(line)
        if line.code:
            yield "code", line.code


def _place(line: Line) -> str:
    return f"{shown(line.file)}:{line.number}" + (f" in {line.function}" if line.function else "")


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _graph_rows(explanation: Explanation) -> list[list[str]]:
    return [
        [
            each.region,
            str(len(each.paths) or "-"),
            *(f"{count:,}" for count in (each.forward, each.backward, each.validation, each.operations)),
            *(f"{count:,}" for count in (each.breaks, each.recompiles)),
        ]
        for each in explanation.graphs
    ]


def _coverage_rows(measured: Coverage) -> list[list[str]]:
    return [
        [
            f"{share.share:.1%}",
            f"{share.seconds * 1e3:.3g}",
            "-" if share.device_seconds is None else f"{share.device_seconds * 1e3:.3g}",
            *("compiled" if share.compiled else "eager", share.phase, share.what),
        ]
        for share in measured.shares
    ]


def _print_details(one: Break | Recompile, console: Console) -> None:
    for name, text in _details(one, MAX_CHANGES):
        if name == "code":
            console.print(Text(f"    {text}", style="bold"))
        elif name == "fix":
            console.print(Text.assemble("  ", ("fix:", "green"), "  ", text))
        elif name != "guard":
            console.print(f"  {name + ':':<6}{text}" if name in ("why", "what") else f"  {text}", markup=False)


def _coverage_table(measured: Coverage) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title_justify="left",
        title=f"\n{measured.compiled_share:.0%} of the step's {measured.step_seconds * 1e3:.3g} ms (host time, "
        f"mean of {measured.steps} steps) is compiled code",
    )
    on_device = any(share.device_seconds is not None for share in measured.shares)
    for name in ("share", "ms", *(["device ms"] if on_device else [])):
        table.add_column(name, justify="right")
    for name in ("", "phase", "what"):
        table.add_column(name)
    for share, ms, device, kind, phase, what in _coverage_rows(measured)[:MAX_SHARES]:
        colour = "green" if kind == "compiled" else "yellow"
        table.add_row(share, ms, *([device] if on_device else []), f"[{colour}]{kind}[/]", phase, markup.escape(what))
    return table


def _section(title: str, parts: Sequence[str]) -> Iterator[str]:
    if parts:
        yield f"<h2>{escape(title)}</h2>"
        yield from parts


def _card(number: int, one: Break | Recompile) -> str:
    tags = {"line": "<p><code>{}</code></p>", "code": "<pre>{}</pre>", "remark": "<p class=soft>{}</p>"}
    tags |= {"fix": "<p><span class=good>Fix:</span> {}</p>", "guard": "<p class=soft>guard: <code>{}</code></p>"}
    body = "".join(
        tags.get(name, "<p>{}</p>").format(escape(text)) for name, text in _details(one, MAX_CHANGES_OF_PAGE)
    )
    tone = "bad" if isinstance(one, Break) else "warn"
    card = "card" if isinstance(one, Break) else "card warn-card"
    return f"<div class='{card}'><h3><span class={tone}>{number}.</span> {escape(_title(one))}</h3>{body}</div>"


def _links(explanation: Explanation, folder: Path) -> Iterator[str]:
    for name, file in explanation.files.items():
        if name == "page":
            continue
        path = Path(file)
        listed = sorted(path.glob("*.py")) if path.is_dir() else []
        for each in listed or [path]:
            link = escape(quote(os.path.relpath(each, folder)), quote=True)
            yield f'<p>{escape(name)}: <a href="{link}"><code>{escape(str(each))}</code></a></p>'


def _coverage_bar(measured: Coverage) -> list[str]:
    seen = dict.fromkeys(COLOURS, 0)
    pieces = []
    for share in measured.shares:
        kind = "compiled" if share.compiled else "eager"
        colour = COLOURS[kind][seen[kind] % len(COLOURS[kind])]
        seen[kind] += 1
        label = escape(f"{share.phase}: {share.what}, {share.share:.1%}", quote=True)
        pieces.append(f'<span style="flex:{share.share:.4f};background:{colour}" title="{label}"></span>')
    return [
        f"<p>{measured.compiled_share:.0%} of {measured.step_seconds * 1e3:.3g} ms is compiled code "
        f"(host time, mean of {measured.steps} steps).</p>",
        f"<div class=bar>{''.join(pieces)}</div>",
        _table(("share", "ms", "device ms", "", "phase", "what"), _coverage_rows(measured), text={3, 4, 5}),
    ]


def _batches(explanation: Explanation) -> str:
    return _table(("tensors", "batches"), [[kind, str(n)] for kind, n in explanation.batch_kinds.items()], text={0})


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], *, text: set[int]) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if index in text else ' class=number'}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{cells(names, 'th')}</tr>{body}</table></div>"
