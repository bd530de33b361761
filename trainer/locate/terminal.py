"""Terminal: a search as it goes, and its verdict in plain words. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from trainer.explain.source import shown
from trainer.locate.investigate import named
from trainer.locate.report import Blamed, OptionTried, Report
from trainer.locate.trial import Outcome
from trainer.telemetry.facts import number

VERBS = {
    "fails": "fails to compile",
    "breaks": "breaks the graph",
    "recompiles": "compiles again at every step",
    "differs": "computes something else than eager",
    "slower": "is slower than eager",
}
MOST_PARTS = 5
"""Parts that are listed with the time that each loses."""
RIGHT = {
    "fails": "compiles",
    "breaks": "breaks no graph",
    "recompiles": "compiles nothing again",
    "differs": "equals eager within its tolerance",
    "slower": "is no slower than eager",
}


def told(number: int, what: str, outcome: Outcome) -> str:
    """A line about one trial."""
    if outcome.shows:
        return f"{number:3}  {what}: yes, {outcome.reason}"
    return f"{number:3}  {what}: no" + (f", it fails: {outcome.reason}" if outcome.reason else "")


def print_report(report: Report, console: Console) -> None:
    """The verdict."""
    for line in _lines(report):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(report: Report) -> Iterator[str]:
    what = f"{report.task}, {report.strategies}"
    if report.symptom is None:
        looked = ", ".join(RIGHT[symptom] for symptom in report.searched_for)
        yield f"[bold green]nothing wrong[/]: {escape(what)} ({escape(named(report.compiled))}) {looked}"
    else:
        verb = VERBS[report.symptom]
        yield f"[bold red]{escape(what)} {verb}[/]: {escape(report.reason or 'no reason given')}"
        yield from _place(report.phase, report.where, report.code)
        yield from _shapes(report)
        for blamed in report.culprits:
            yield from _culprit(blamed, verb)
        if report.together:
            yield from _together(report, verb)
        yield from _options(report.options)
        yield from _rest(report)
        for line in report.suggestions:
            yield f"[bold]go on with[/]: {escape(line)}"
        yield from _reproducer(report)
    for note in report.notes:
        yield f"[dim]note: {escape(note)}[/]"
    yield f"[dim]{report.trials} trials in {report.seconds:.0f} s on {report.device}[/]"


def _place(phase: str | None, where: str | None, code: str | None) -> Iterator[str]:
    if phase is not None or where is not None:
        said = [f"in the {phase}" if phase else "", f"at {shown(where)}" if where else ""]
        yield f"  {escape(' '.join(filter(None, said)))}"
    if code:
        yield f"    {escape(code)}"


def _culprit(blamed: Blamed, verb: str) -> Iterator[str]:
    kind = f" ({blamed.kind}, {shown(f'{blamed.file}:{blamed.line}')})" if blamed.file else ""
    kind = kind or (f" ({blamed.kind})" if blamed.kind else "")
    yield f"[bold]culprit[/]: {escape(blamed.path + kind)}: compiled alone it {verb}: {escape(blamed.reason or '')}"
    yield from _place(blamed.phase, blamed.where, blamed.code)
    if blamed.own_code:
        yield "  what it is made of shows nothing: it is its own code, or its parts in one graph"
    if blamed.copies:
        yield f"  so do, compiled together, {len(blamed.copies)} more like it: {escape(named(blamed.copies))}"


def _together(report: Report, verb: str) -> Iterator[str]:
    paths, reason = escape(", ".join(report.together)), escape(report.together_reason or "")
    if report.symptom != "slower":
        yield f"[bold]only together[/]: {paths}: each alone shows nothing, with all of them the step {verb}: {reason}"
        return
    yield f"[bold]spread[/]: no part alone loses half of it; {paths} together do: {reason}"
    for path, lost in sorted(report.lost_seconds_by_part.items(), key=lambda item: -item[1])[:MOST_PARTS]:
        yield f"  {escape(path)} alone: {number(abs(lost) * 1e3)} ms {'slower' if lost > 0 else 'faster'} than eager"


def _shapes(report: Report) -> Iterator[str]:
    if report.shape_sequence is not None:
        yield f"[bold]shapes[/]: only with batches of several shapes: {escape(', then '.join(report.shape_sequence))}"
    elif report.shapes_that_show is not None:
        showing, tried = report.shapes_that_show, len(report.shapes)
        if len(showing) == tried:
            yield f"[bold]shapes[/]: with each of the {tried} shapes of batch that were tried"
        else:
            yield f"[bold]shapes[/]: with {len(showing)} of {tried} shapes of batch: {escape('; '.join(showing))}"


def _options(options: list[OptionTried]) -> Iterator[str]:
    for option in options:
        instead = f"fails instead: {option.reason}" if option.reason else "makes it go"
        said = "shows it too" if option.shows else instead
        kind = "compiler" if option.backend else "option"
        yield f"[bold]{kind}[/]: {escape(option.said)} {escape(said)}"


def _rest(report: Report) -> Iterator[str]:
    if report.rest_is_clean is None:
        yield "[bold]the rest[/]: there is none, everything else is the code between submodules"
    elif report.rest_is_clean:
        yield f"[bold]the rest[/]: {len(report.rest)} submodules compile without it: {escape(named(report.rest))}"
    else:
        reason = report.rest_reason or "no reason given"
        yield f"[bold]the rest[/] shows it still ({escape(reason)}): {escape(named(report.rest))}"


def _reproducer(report: Report) -> Iterator[str]:
    if report.reproducer is None:
        return
    said = {True: "shows it", False: "does not show it: it takes the whole step", None: "was not run"}
    yield f"[bold]reproducer[/]: python {escape(shlex.quote(report.reproducer))} ({said[report.reproducer_shows]})"
