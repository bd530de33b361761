"""Report: what a search found, in types that JSON knows, and its verdict in plain words. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from scripts.bisect.trial import Outcome
from trainer.telemetry.facts import number
from trainer.telemetry.files import finite
from trainer.telemetry.source import shown

SCHEMA = 2
"""Raised when the name or the meaning of a field changes. Up to 1, ``text`` of an option was ``said``."""
NOTHING_WRONG, FOUND, ONLY_TOGETHER = 0, 1, 3
"""Exit codes."""
MAX_PATHS = 3
MAX_PARTS = 5
"""Parts that are listed with the time that each loses."""
VERBS = {
    "fails": "fails to compile",
    "breaks": "breaks the graph",
    "recompiles": "compiles again at every step",
    "differs": "computes something else than eager",
    "slower": "is slower than eager",
}
RIGHT = {
    "fails": "compiles",
    "breaks": "breaks no graph",
    "recompiles": "compiles nothing again",
    "differs": "equals eager within its tolerance",
    "slower": "is not slower than eager",
}


@dataclass(slots=True, kw_only=True)
class Culprit:
    """The smallest submodule, or the optimizer step, that shows the symptom when nothing else is compiled."""

    path: str
    kind: str | None = None
    """Name of its class; None for the optimizer step."""
    file: str | None = None
    line: int | None = None
    """Where its class begins."""
    reason: str | None = None
    """What was seen of it alone."""
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer step``; None where that is not known, or is not a failure."""
    where: str | None = None
    """``file:line in function`` of the error or break itself."""
    code: str | None = None
    copies: list[str] = field(default_factory=list)
    """Others like it that show it too, compiled together."""
    own_code: bool = False
    """Whether its children show nothing, together neither: it is its own code, or how they are one graph."""


@dataclass(slots=True, kw_only=True)
class OptionTried:
    """One option of the strategy with another value, everything compiled."""

    text: str
    """As it is typed, or in words where it is taken away."""
    shows: bool = False
    reason: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """The options' values."""
    backend: bool = False
    """Whether it is another compiler, and shows whose fault it is rather than how to continue."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    task: str
    strategies: str
    command: list[str]
    """Overrides as they were given."""
    symptom: str | None = None
    """``fails``, ``breaks``, ``recompiles``, ``differs`` or ``slower``; None where nothing is wrong."""
    searched_for: list[str] = field(default_factory=list)
    """Symptoms that the whole was tried for."""
    compiled: list[str] = field(default_factory=list)
    """What the strategies compile: paths of submodules, the optimizer step."""
    reason: str | None = None
    """What was seen with everything compiled."""
    phase: str | None = None
    where: str | None = None
    code: str | None = None
    lost_seconds: float | None = None
    """Median seconds that a step with everything compiled takes longer than eager's; None where none was timed."""
    eager_seconds: float | None = None
    lost_seconds_by_part: dict[str, float] = field(default_factory=dict)
    """The same with one part compiled alone, for each that was timed alone; negative where it is faster."""
    shapes: list[str] = field(default_factory=list)
    """Shapes of the batches that were tried."""
    shapes_that_show: list[str] | None = None
    """Those that show it alone; None where only one shape was tried, empty where it takes several after each other."""
    shape_sequence: list[str] | None = None
    """Shapes that show it in this order; None where one is enough."""
    culprits: list[Culprit] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """Submodules that show it only when all of them are compiled."""
    together_reason: str | None = None
    options: list[OptionTried] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    """Largest submodules that hold no culprit."""
    rest_is_clean: bool | None = None
    """Whether compiling the rest shows nothing; None where there is no rest."""
    rest_reason: str | None = None
    suggestions: list[str] = field(default_factory=list)
    """Commands that continue without the symptom."""
    reproducer: str | None = None
    reproducer_shows: bool | None = None
    """Whether running it showed the same; None where it was not run."""
    trials: int = 0
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        if self.symptom is None:
            return NOTHING_WRONG
        return FOUND if self.culprits or not self.together else ONLY_TOGETHER

    def as_json(self) -> str:
        """Everything, and the exit code."""
        facts: dict[str, Any] = {**dataclasses.asdict(self), "exit_code": self.exit_code}
        return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"


def named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
    return ", ".join(paths[:MAX_PATHS]) + more


def trial_line(number: int, what: str, outcome: Outcome) -> str:
    if outcome.shows:
        return f"{number:3}  {what}: yes, {outcome.reason}"
    return f"{number:3}  {what}: no" + (f", it fails: {outcome.reason}" if outcome.reason else "")


def print_report(report: Report, console: Console) -> None:
    for line in _lines(report):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(report: Report) -> Iterator[str]:
    what = f"{report.task}, {report.strategies}"
    if report.symptom is None:
        right = ", ".join(RIGHT[symptom] for symptom in report.searched_for)
        yield f"[bold green]nothing wrong[/]: {escape(what)} ({escape(named(report.compiled))}) {right}"
    else:
        yield from _problem(report, what, VERBS[report.symptom])
    for note in report.notes:
        yield f"[dim]note: {escape(note)}[/]"
    yield f"[dim]{report.trials} trials in {report.seconds:.0f} s on {report.device}[/]"


def _problem(report: Report, what: str, verb: str) -> Iterator[str]:
    yield f"[bold red]{escape(what)} {verb}[/]: {escape(report.reason or 'no reason given')}"
    yield from _place(report)
    tried = len(report.shapes)
    if report.shape_sequence is not None:
        yield f"[bold]shapes[/]: only with batches of several shapes: {escape(', then '.join(report.shape_sequence))}"
    elif report.shapes_that_show is not None and len(report.shapes_that_show) == tried:
        yield f"[bold]shapes[/]: with each of the {tried} shapes of batch that were tried"
    elif report.shapes_that_show is not None:
        showing = report.shapes_that_show
        yield f"[bold]shapes[/]: with {len(showing)} of {tried} shapes of batch: {escape('; '.join(showing))}"
    for culprit in report.culprits:
        yield from _culprit(culprit, verb)
    if report.together:
        yield from _together(report, verb)
    for option in report.options:
        instead = f"fails instead: {option.reason}" if option.reason else "makes it go away"
        kind = "compiler" if option.backend else "option"
        yield f"[bold]{kind}[/]: {escape(option.text)} {escape('shows it too' if option.shows else instead)}"
    rest = escape(named(report.rest))
    if report.rest_is_clean is None:
        yield "[bold]the rest[/]: there is none, everything else is the code between submodules"
    elif report.rest_is_clean:
        yield f"[bold]the rest[/]: {len(report.rest)} submodules compile without it: {rest}"
    else:
        yield f"[bold]the rest[/] still shows it ({escape(report.rest_reason or 'no reason given')}): {rest}"
    for line in report.suggestions:
        yield f"[bold]continue with[/]: {escape(line)}"
    if report.reproducer is not None:
        shows = {True: "shows it", False: "does not show it: it takes the whole step", None: "was not run"}
        command = escape(shlex.quote(report.reproducer))
        yield f"[bold]reproducer[/]: python {command} ({shows[report.reproducer_shows]})"


def _place(seen: Report | Culprit) -> Iterator[str]:
    parts = [f"in the {seen.phase}" if seen.phase else "", f"at {shown(seen.where)}" if seen.where else ""]
    if any(parts):
        yield f"  {escape(' '.join(filter(None, parts)))}"
    if seen.code:
        yield f"    {escape(seen.code)}"


def _culprit(culprit: Culprit, verb: str) -> Iterator[str]:
    kind = f" ({culprit.kind}, {shown(f'{culprit.file}:{culprit.line}')})" if culprit.file else ""
    kind = kind or (f" ({culprit.kind})" if culprit.kind else "")
    yield f"[bold]culprit[/]: {escape(culprit.path + kind)}: compiled alone it {verb}: {escape(culprit.reason or '')}"
    yield from _place(culprit)
    if culprit.own_code:
        yield "  what it is made of shows nothing: it is its own code, or its parts in one graph"
    if culprit.copies:
        yield f"  so do, compiled together, {len(culprit.copies)} more like it: {escape(named(culprit.copies))}"


def _together(report: Report, verb: str) -> Iterator[str]:
    paths, reason = escape(", ".join(report.together)), escape(report.together_reason or "")
    if report.symptom != "slower":
        yield f"[bold]only together[/]: {paths}: each alone shows nothing, with all of them the step {verb}: {reason}"
        return
    yield f"[bold]spread[/]: no part alone loses half of it; {paths} together do: {reason}"
    for path, lost in sorted(report.lost_seconds_by_part.items(), key=lambda item: -item[1])[:MAX_PARTS]:
        yield f"  {escape(path)} alone: {number(abs(lost) * 1e3)} ms {'slower' if lost > 0 else 'faster'} than eager"
