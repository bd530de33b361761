"""Report: an explanation as rich prints it, problems first; the HTML page is the same text, with everything in it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from rich import markup
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from scripts.explain.explanation import Break, Coverage, Explanation, Recompile
from trainer.telemetry.source import Line, shown

MAX_CHANGES, MAX_SHARES = 4, 12
"""Changes of one value, and parts of a step, that the terminal shows."""
PAGE_WIDTH = 160
PAGE = """\
<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>
<title>TITLE</title>
<style>
body {{ background: #fff; color: #222; max-width: 100rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }}
@media (prefers-color-scheme: dark) {{ html {{ background: #fff; filter: invert(1) hue-rotate(180deg); }} }}
{stylesheet}
</style></head>
<body><pre>{code}</pre></body></html>
"""


def print_explanation(explanation: Explanation, console: Console, *, page_folder: Path | None = None) -> None:
    """Print what a reader needs; JSON holds the rest.

    With ``page_folder``, where a page will lie, it is everything, and files are links from there.
    """
    everything = page_folder is not None
    console.print(heading(explanation), markup=False)
    for number, failure in enumerate(explanation.failures, 1):
        console.print(f"\n[red bold]does not compile {number}[/]: {markup.escape(failure)}")
    for number, one in enumerate(explanation.breaks, 1):
        _print_problem(f"[red bold]graph break {number}[/]", one, console, everything=everything)
    for number, recompile in enumerate(explanation.unexpected, 1):
        _print_problem(f"[yellow bold]recompile {number}[/]", recompile, console, everything=everything)
    console.print()
    if explanation.graphs:
        console.print(_graphs(explanation))
    if explanation.coverage is not None:
        console.print(_coverage(explanation.coverage, max_shares=None if everything else MAX_SHARES))
    for line in lines_at_the_end(explanation):
        console.print(line, markup=False)
    if everything:
        for kind, count in explanation.batch_kinds.items():
            console.print(f"{_count(count, 'batch', 'batches')}: {kind}", markup=False)
    for name, file in explanation.files.items():
        if page_folder is None:
            console.print(f"{name}: {file}", markup=False)
        elif name != "page":
            for each in sorted(Path(file).glob("*.py")) or [Path(file)]:
                link = Style(link=quote(os.path.relpath(each, page_folder)))
                console.print(Text.assemble(f"{name}: ", (str(each), link)))
    if everything and explanation.command:
        console.print(f"python -m scripts.explain {' '.join(explanation.command)}", markup=False)
    console.print(f"[bold]{markup.escape(verdict(explanation))}[/]")


def page(explanation: Explanation, folder: Path | None = None) -> str:
    """One HTML document, to lie in ``folder`` (None = the working directory), from which its links lead."""
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH, highlight=False, soft_wrap=True)
    print_explanation(explanation, console, page_folder=folder or Path.cwd())
    title = escape(f"{explanation.task} under {explanation.strategies}").replace("{", "{{").replace("}", "}}")
    return console.export_html(code_format=PAGE.replace("TITLE", title))


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


def _print_problem(title: str, one: Break | Recompile, console: Console, *, everything: bool) -> None:
    identifier = f" ({one.identifier})" if isinstance(one, Break) and one.identifier else ""
    times = "" if one.count == 1 else f", {one.count} times"
    console.print(f"\n{title}: {markup.escape(one.kind + identifier + times)}")
    _print_line(one.where, console)
    if isinstance(one, Break):
        if one.inside is not None:
            console.print(f"  which reaches {_place(one.inside)}", markup=False)
        if one.called_from is not None:
            console.print("  called from")
            _print_line(one.called_from, console)
    if one.region:
        console.print(f"  in region {one.region}", markup=False)
    if isinstance(one, Break):
        console.print(f"  why:  {one.reason}", markup=False)
    else:
        kept = one.changes if everything else one.changes[:MAX_CHANGES]
        more = [f"{len(one.changes) - len(kept)} more"] if len(kept) < len(one.changes) else []
        changes = "; ".join([*kept, *more])
        console.print(f"  what: {one.what}" + (f": {changes}" if changes else ""), markup=False)
    console.print(Text.assemble("  ", ("fix:", "green"), "  ", one.fix))
    if everything and isinstance(one, Recompile) and one.guard != one.what:
        console.print(f"  guard: {one.guard}", markup=False)


def _print_line(line: Line | None, console: Console) -> None:
    if line is not None:
        console.print(f"  {_place(line)}", markup=False)
        if line.code:
            console.print(Text(f"    {line.code}", style="bold"))


def _place(line: Line) -> str:
    return f"{shown(line.file)}:{line.number}" + (f" in {line.function}" if line.function else "")


def _count(number: int, name: str, several: str = "") -> str:
    return f"{number} {name if number == 1 else several or name + 's'}"


def _graphs(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("region", "copies", "forward", "backward", "val", "ops", "breaks", "recompiles"):
        table.add_column(name, justify="left" if name == "region" else "right", overflow="fold")
    for each in explanation.graphs:
        counts = (each.forward, each.backward, each.validation, each.operations, each.breaks, each.recompiles)
        table.add_row(markup.escape(each.region), str(len(each.paths) or "-"), *(f"{count:,}" for count in counts))
    return table


def _coverage(measured: Coverage, *, max_shares: int | None) -> Table:
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
    for share in measured.shares[:max_shares]:
        device = "-" if share.device_seconds is None else f"{share.device_seconds * 1e3:.3g}"
        table.add_row(
            f"{share.share:.1%}",
            f"{share.seconds * 1e3:.3g}",
            *([device] if on_device else []),
            "[green]compiled[/]" if share.compiled else "[yellow]eager[/]",
            share.phase,
            markup.escape(share.what),
        )
    return table
