"""Explanation: what was found out about one training step, in types that JSON knows, and as rich prints it.

Units are in the field names; what was not looked at is None and named in ``not_looked_at``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich import markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.telemetry.files import finite
from trainer.telemetry.source import Line, shown

SCHEMA = 3
"""Raised when the name or the meaning of a field changes."""
MAX_CHANGES, MAX_SHARES, MIN_SHARE = 4, 12, 0.005
"""Changes of one value, and parts of a step, that the terminal shows; JSON has all."""


@dataclass(kw_only=True, slots=True)
class Break:
    """One place where the compiler ends a graph and continues in Python."""

    kind: str
    """Torch's name for this kind of break."""
    identifier: str | None
    """Torch's number of the kind (``GB0124``); None where it gives none."""
    reason: str
    """Torch's explanation."""
    fix: str
    """Torch's own hints, and a link to its page about the kind."""
    where: Line | None
    """The line that the graph ends at, outside of torch and Lightning."""
    called_from: Line | None = None
    """The line of the user's own code that led there, where ``where`` is in a library."""
    inside: Line | None = None
    """The line of torch or Lightning that it leads to, where the graph ends there."""
    region: str | None = None
    phase: str = "training"
    count: int = 1
    """How often it was traced."""


@dataclass(kw_only=True, slots=True)
class Recompile:
    """One guard that failed, so that code which had been compiled was compiled again."""

    kind: str
    """``shape``, ``dtype``, ``training flag``, ``number``, ...; see ``trainer.telemetry.recompiles``."""
    what: str
    """What changed: an expression in the user's code, or a tensor."""
    guard: str
    """The guard in torch's words."""
    changes: list[str] = field(default_factory=list)
    """``before -> after``, one for each time."""
    fix: str = ""
    where: Line | None = None
    """The line that reads what changed, or the function that was compiled again."""
    region: str | None = None
    phase: str = "training"
    count: int = 1
    expected: bool = False
    """Whether every run has it: graphs of validation, of copies that have other sizes, and of shapes that a strategy
    compiles beforehand."""
    resumed: bool = False
    """Whether what was compiled again is the rest of a function behind a break."""


@dataclass(kw_only=True, slots=True)
class Graphs:
    """Graphs of one kind of region; regions of one kind share them."""

    region: str
    """Class of the submodule, ``optimizer``, or ``outside regions``."""
    paths: list[str] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    """Backward graphs that were compiled; a backend without autograd has none."""
    validation: int = 0
    operations: int = 0
    """Operations in the forward graphs."""
    breaks: int = 0
    recompiles: int = 0


@dataclass(kw_only=True, slots=True)
class Share:
    """Part of the measured step."""

    phase: str
    """``forward``, ``backward``, ``optimizer`` or ``host``."""
    what: str
    seconds: float
    """On the host."""
    share: float
    """Of the step's host time."""
    compiled: bool
    device_seconds: float | None = None
    """Of the kernels launched there; None without an accelerator."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """How much of the step compiled code is."""

    step_seconds: float
    """Host time of the median step, to which the shares add up."""
    compiled_share: float
    """Share of the step's host time within compiled code, forward, backward and optimizer."""
    steps: int
    """Steps that were profiled."""
    shares: list[Share] = field(default_factory=list)
    """Largest first."""


@dataclass(kw_only=True, slots=True)
class Explanation:
    """Everything about one task under one list of strategies."""

    task: str
    strategies: str
    backend: str
    command: list[str] = field(default_factory=list)
    device: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    batches: int = 0
    """Training batches of the epoch that were looked at."""
    batches_run: int = 0
    """Of those, run through forward, backward and optimizer step: the first ones, then one of each new kind."""
    batch_kinds: dict[str, int] = field(default_factory=dict)
    """Batches by the shapes of their tensors."""
    stopped: str | None = None
    """Why not the whole epoch was looked at; None when it was."""
    graphs: list[Graphs] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What did not compile at all, or ended the steps."""
    coverage: Coverage | None = None
    notes: list[str] = field(default_factory=list)
    """Notes of the strategies."""
    not_looked_at: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[Recompile]:
        """Recompiles that a fix would save."""
        return [recompile for recompile in self.recompiles if not recompile.expected]

    @property
    def problems(self) -> int:
        return len(self.breaks) + len(self.unexpected) + len(self.failures)

    def as_json(self) -> str:
        """One JSON document, indented, with a newline at its end."""
        facts = {"schema": SCHEMA, "problems": self.problems, **dataclasses.asdict(self)}
        return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print what a reader needs, problems first; JSON holds the rest."""
    console.print(_heading(explanation), markup=False)
    for number, failure in enumerate(explanation.failures, 1):
        console.print(f"\n[red bold]does not compile {number}[/]: {markup.escape(failure)}")
    for number, one in enumerate(explanation.breaks, 1):
        _print_problem(f"[red bold]graph break {number}[/]", one, console)
    for number, recompile in enumerate(explanation.unexpected, 1):
        _print_problem(f"[yellow bold]recompile {number}[/]", recompile, console)
    console.print()
    if explanation.graphs:
        console.print(_graphs(explanation))
    if explanation.coverage is not None:
        console.print(_coverage(explanation.coverage))
    for line in _lines_at_the_end(explanation):
        console.print(line, markup=False)
    console.print(f"[bold]{markup.escape(verdict(explanation))}[/]")


def _heading(explanation: Explanation) -> str:
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


def _lines_at_the_end(explanation: Explanation) -> Iterator[str]:
    """What is expected, notes, what was left out."""
    expected = sum(recompile.count for recompile in explanation.recompiles if recompile.expected)
    if expected:
        yield (
            f"expected: {expected} more {'graph' if expected == 1 else 'graphs'} (validation, copies of other sizes, "
            "shapes compiled beforehand), which torch counts as recompiles"
        )
    yield from (f"note: {note}" for note in explanation.notes)
    yield from (f"not looked at: {each}" for each in explanation.not_looked_at)


def _print_problem(title: str, one: Break | Recompile, console: Console) -> None:
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
        more = [f"{len(one.changes) - MAX_CHANGES} more"] if len(one.changes) > MAX_CHANGES else []
        changes = "; ".join([*one.changes[:MAX_CHANGES], *more])
        console.print(f"  what: {one.what}" + (f": {changes}" if changes else ""), markup=False)
    console.print(Text.assemble("  ", ("fix:", "green"), "  ", one.fix))


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


def _coverage(measured: Coverage) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title_justify="left",
        title=f"\n{measured.compiled_share:.0%} of the step's {measured.step_seconds * 1e3:.3g} ms (host time, "
        f"median of {measured.steps} steps) is compiled code",
    )
    on_device = any(share.device_seconds is not None for share in measured.shares)
    for name in ("share", "ms", *(["device ms"] if on_device else [])):
        table.add_column(name, justify="right")
    for name in ("", "phase", "what"):
        table.add_column(name)
    for share in (each for each in measured.shares[:MAX_SHARES] if each.share >= MIN_SHARE):
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
