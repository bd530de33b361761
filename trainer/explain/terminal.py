"""Terminal: an explanation as rich prints it, problems first."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.explain.explanation import Break, Explanation, Line, Recompile
from trainer.explain.source import shown

MOST_CHANGES = 4
"""Changes of one value that are shown."""
MOST_SHARES = 12
MOST_KINDS = 5


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print everything that a reader needs; JSON and the page hold the rest."""
    console.print(heading(explanation), markup=False)
    for number, failure in enumerate(explanation.failures, 1):
        console.print(f"\n[red bold]does not compile {number}[/]: {escape(failure)}")
    for number, one_break in enumerate(explanation.breaks, 1):
        _print_break(number, one_break, console)
    for number, recompile in enumerate(explanation.unexpected, 1):
        _print_recompile(number, recompile, console)
    console.print()
    if explanation.graphs:
        console.print(_graphs(explanation))
    if explanation.coverage is not None:
        console.print(_coverage(explanation))
    for line in (*lines_at_the_end(explanation), *(f"{name}: {file}" for name, file in explanation.files.items())):
        console.print(line, markup=False)
    console.print(f"[bold]{escape(verdict(explanation))}[/]")


def heading(explanation: Explanation) -> str:
    """What was looked at, in a line or two."""
    looked = f"{explanation.batches:,} batches looked at, {explanation.batches_run:,} run"
    kinds = len(explanation.batch_kinds)
    looked += f", {kinds} {'kind' if kinds == 1 else 'kinds'}"
    if explanation.stopped:
        looked += f" (not the whole epoch: {explanation.stopped})"
    version = explanation.versions.get("torch") or "n/a"
    return (
        f"{explanation.task} under {explanation.strategies}, backend {explanation.backend or 'n/a'}, "
        f"torch {version} on {explanation.device or 'n/a'}\n{looked}"
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
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)


def lines_at_the_end(explanation: Explanation) -> Iterator[str]:
    """Kernels, what is expected, notes, what was left out."""
    kernels = explanation.kernels
    if kernels is not None:
        yield (
            f"kernels: {kernels.nodes_before_fusion:,} operations became {kernels.generated:,} generated kernels and "
            f"{kernels.external_calls:,} library calls"
        )
        if kernels.cudagraph_skips is not None:
            yield (
                f"CUDA graphs: {kernels.cudagraph_skips} graphs left out"
                if kernels.cudagraph_skips
                else ("CUDA graphs: none left out")
            )
            yield from (f"  {reason}" for reason in kernels.cudagraph_reasons)
    expected = sum(recompile.count for recompile in explanation.recompiles if recompile.expected)
    if expected:
        yield (
            f"expected: {expected} more {'graph' if expected == 1 else 'graphs'} (validation, copies of other sizes, "
            "shapes compiled beforehand), which torch counts as recompiles"
        )
    yield from (f"note: {note}" for note in explanation.notes)
    yield from (f"not looked at: {each}" for each in explanation.not_looked_at)


def place(line: Line | None) -> str:
    """``file:line in function``."""
    if line is None:
        return "n/a"
    return f"{shown(line.file)}:{line.number}" + (f" in {line.function}" if line.function else "")


def times(count: int) -> str:
    """How often, where more than once."""
    return "" if count == 1 else f", {count} times"


def changes(recompile: Recompile, most: int = MOST_CHANGES) -> str:
    """``before -> after`` of the first few times."""
    more = len(recompile.changes) - most
    return "; ".join(recompile.changes[:most]) + (f"; {more} more" if more > 0 else "")


def _print_break(number: int, one: Break, console: Console) -> None:
    name = f" ({one.identifier})" if one.identifier else ""
    console.print(f"\n[red bold]graph break {number}[/]: {escape(one.kind)}{name}{times(one.count)}")
    _print_line(one.where, console)
    if one.inside is not None:
        console.print(f"  which reaches {place(one.inside)}", markup=False)
    if one.called_from is not None:
        console.print("  called from", markup=False)
        _print_line(one.called_from, console)
    if one.region:
        console.print(f"  in region {one.region}", markup=False)
    console.print(f"  why:  {one.reason}", markup=False)
    console.print(Text.assemble("  ", ("mend:", "green"), " ", one.mend))


def _print_recompile(number: int, one: Recompile, console: Console) -> None:
    console.print(f"\n[yellow bold]recompile {number}[/]: {escape(one.kind)}{times(one.count)}")
    _print_line(one.where, console)
    if one.region:
        console.print(f"  in region {one.region}", markup=False)
    console.print(f"  what: {one.what}" + (f": {changes(one)}" if one.changes else ""), markup=False)
    console.print(Text.assemble("  ", ("mend:", "green"), " ", one.mend))


def _print_line(line: Line | None, console: Console) -> None:
    if line is None:
        return
    console.print(Text(f"  {place(line)}"))
    if line.code:
        console.print(Text(f"    {line.code}", style="bold"))


def _graphs(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("region", "copies", "forward", "backward", "val", "ops", "breaks", "recompiles"):
        table.add_column(name, justify="left" if name == "region" else "right", overflow="fold")
    for each in explanation.graphs:
        counts = (each.forward, each.backward, each.validation, each.operations, each.breaks, each.recompiles)
        table.add_row(escape(each.region), str(len(each.paths) or "-"), *(f"{count:,}" for count in counts))
    return table


def _coverage(explanation: Explanation) -> Table:
    measured = explanation.coverage
    assert measured is not None
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title_justify="left",
        title=f"\n{measured.compiled_share:.0%} of the step's {measured.step_seconds * 1e3:.3g} ms (host time, "
        f"mean of {measured.steps} steps) is compiled code",
    )
    on_device = any(share.device_seconds is not None for share in measured.shares)
    table.add_column("share", justify="right")
    table.add_column("ms", justify="right")
    if on_device:
        table.add_column("device ms", justify="right")
    for name in ("", "phase", "what"):
        table.add_column(name)
    for share in measured.shares[:MOST_SHARES]:
        device = [] if not on_device else ["-" if share.device_seconds is None else f"{share.device_seconds * 1e3:.3g}"]
        kind = "[green]compiled[/]" if share.compiled else "[yellow]eager[/]"
        table.add_row(
            f"{share.share:.1%}", f"{share.seconds * 1e3:.3g}", *device, kind, share.phase, escape(share.what)
        )
    return table
