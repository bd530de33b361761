"""Report: what is tried, what came of it and what was found, and the verdict in plain words. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from trainer.telemetry.facts import number
from trainer.telemetry.files import finite
from trainer.telemetry.source import shown

SYMPTOMS = ("fails", "breaks", "recompiles", "differs", "slower")
"""What a compile can do wrong, in the order in which a program is searched for it."""
OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""
SCHEMA = 3
"""Raised when the name or the meaning of a field changes."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One try: these submodules compiled each by itself, all others eager, on these batches one after the other."""

    symptom: str
    """One of ``SYMPTOMS``: what is looked for."""
    paths: tuple[str, ...]
    """Submodules, and ``OPTIMIZER`` for the optimizer step."""
    batches: tuple[int, ...] = (0,)
    """Numbers of the batches, in the order in which they are run after each other."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy that have another value for this try; ``options`` is replaced as a whole."""
    min_lost_seconds: float | None = None
    """A step that takes so much longer than eager's is slower; None = from the usual margin on."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    shows: bool
    """Whether the symptom was seen."""
    reason: str | None = None
    """What was seen, in one line; None where nothing was."""
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer step`` of a failure; None where that is not known."""
    where: str | None = None
    """``file:line in function`` that the compiler or the error names."""
    code: str | None = None
    """Text of that line."""
    batch: int | None = None
    """Number of the batch that showed it."""
    lost_seconds: float | None = None
    """Median seconds that a step takes longer than eager's; negative where it is faster. Timed trials only."""
    eager_seconds: float | None = None
    """Median seconds of a step of eager. Timed trials only."""
    crashed: bool = False
    """Whether the process was lost: a signal, or the time limit."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A submodule, and those below it."""

    path: str
    """As in ``module.get_submodule(path)``."""
    kind: str
    """Name of its class."""
    file: str | None = None
    """File of its class; None where there is none to read."""
    line: int | None = None
    """First line of the class."""
    likeness: str = ""
    """Equal for submodules that the compiler can be expected to treat alike: class, children, sizes of weights."""
    called: bool = True
    """Whether a step calls it: a list of modules is not called, nor is a layer whose weight alone is used."""
    children: list[Node] = field(default_factory=list)
    """Direct children in the module tree."""


@dataclass(slots=True, kw_only=True)
class Site:
    """What there is to search: the regions of a program and the shapes of its batches."""

    regions: list[Node]
    """What the strategies hand to the compiler, each with what it holds."""
    strategy: str | None
    """Name of the strategy that does so; None where only the optimizer step is compiled."""
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of each region that a ``Part`` of ``modular`` would have to set, by path."""
    paths: list[str] = field(default_factory=list)
    """Every submodule of the model, for wildcards that match no other."""
    optimizer: bool = False
    """Whether a strategy compiles the optimizer step."""
    batches: list[str] = field(default_factory=list)
    """What each batch looks like: dtypes and shapes."""
    device: str = "cpu"
    """Type of the device."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of torch and others."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    @property
    def everything(self) -> tuple[str, ...]:
        return (*(node.path for node in self.regions), *([OPTIMIZER] if self.optimizer else []))


@dataclass(slots=True, kw_only=True)
class Culprit:
    """The smallest submodule, or the optimizer step, that shows the symptom when nothing else is compiled."""

    path: str
    kind: str | None = None
    """Name of its class; None for the optimizer step."""
    file: str | None = None
    line: int | None = None
    """Where its class begins."""
    outcome: Outcome
    """What was seen of it alone."""
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
    whole: Outcome | None = None
    """What was seen with everything compiled; None where nothing was tried."""
    lost_seconds_by_part: dict[str, float] = field(default_factory=dict)
    """``lost_seconds`` of one part compiled alone, for each that was timed alone."""
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
    assert report.whole is not None
    yield f"[bold red]{escape(what)} {verb}[/]: {escape(report.whole.reason or 'no reason given')}"
    yield from _place(report.whole)
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


def _place(seen: Outcome) -> Iterator[str]:
    parts = [f"in the {seen.phase}" if seen.phase else "", f"at {shown(seen.where)}" if seen.where else ""]
    if any(parts):
        yield f"  {escape(' '.join(filter(None, parts)))}"
    if seen.code:
        yield f"    {escape(seen.code)}"


def _culprit(culprit: Culprit, verb: str) -> Iterator[str]:
    kind = f" ({culprit.kind}, {shown(f'{culprit.file}:{culprit.line}')})" if culprit.file else ""
    kind = kind or (f" ({culprit.kind})" if culprit.kind else "")
    reason = escape(culprit.outcome.reason or "")
    yield f"[bold]culprit[/]: {escape(culprit.path + kind)}: compiled alone it {verb}: {reason}"
    yield from _place(culprit.outcome)
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
