"""Find the submodule or option that a compile goes wrong with: ``crucible bisect compile=whole``.

Takes the trainer's overrides and tries what they compile piece by piece, each try in a process that may crash or hang:
the smallest submodule that fails, breaks the graph, differs from eager or is slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from scripts.arguments import composed_training, exit_code, parser, positive, seconds
from scripts.bisect.search import OPTIMIZER, SYMPTOMS, Culprit, Outcome, Report, Search, Site, holds, named, searched
from scripts.bisect.worker import RemoteBench
from strategies import Modular, Stage, Strategy
from strategies.compose import label, ordered
from strategies.modular import Part
from trainer.config import compose
from trainer.process import keep_streams, leaving
from trainer.telemetry.source import shown

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager --for differs
  crucible bisect compile=whole --for slower --shapes 1

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments, 3 it takes several submodules together,
128 + signal interrupted.
"""
VERBS = {
    "fails": "fails to compile",
    "breaks": "breaks the graph",
    "differs": "computes something else than eager",
    "slower": "is slower than eager",
}
RIGHT = {
    "fails": "compiles",
    "breaks": "breaks no graph",
    "differs": "equals eager within its tolerance",
    "slower": "is not slower than eager",
}
PLAIN = re.compile(r"[\w./:+*?@%-]+")
"""Text that Hydra reads without quotes."""


def main(arguments: list[str] | None = None) -> int:
    keep_streams()
    options = parse(arguments)
    return exit_code(lambda _: bisect(options), interrupted="nothing was found yet")


def bisect(options: argparse.Namespace) -> int:
    """Search, suggest, print; progress goes to stderr."""
    config, overrides = composed_training(options.overrides, config_dir=options.config_dir, looks="bisect tries")
    strategies = list(config.compile.values())
    searched(strategies)
    report = Report(task=config.task.title, strategies=label(strategies))
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    given = overrides, options.config_dir, options.shapes
    with (
        progress.status("building data and model") as status,
        RemoteBench(*given, trial_seconds=options.trial_seconds) as bench,
    ):
        search = Search(
            bench,
            report,
            begins=lambda number, what: status.update(f"{number}  {what}"),
            ended=lambda number, what, outcome: progress.print(trial_line(number, what, outcome)),
        )
        search.run(SYMPTOMS if options.symptom is None else (options.symptom,))
    console = Console(highlight=False, soft_wrap=True)
    for line in lines(report):
        console.print(line)
    if report.rest_is_clean:
        suggested = modular_overrides(overrides, strategies, bench.site, report.rest)
        if options.config_dir is None:  # whose plugin.py need not bear to be run twice
            compose(suggested)  # what is suggested is a command that is understood
        folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
        command = shlex.join(["python", "-m", "trainer", *folder, *suggested])
        console.print(f"[bold]continue with[/]: {escape(command)}")
    return report.exit_code


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("bisect", __doc__ or "", EXAMPLES, overrides=True)
    add = made.add_argument
    symptom_help = "what to look for (default: the first of these that everything compiled shows)"
    add("--for", dest="symptom", choices=SYMPTOMS, help=symptom_help)
    shapes_help = "different shapes of batch to try, one after the other (default: %(default)s)"
    add("--shapes", type=positive, default=4, metavar="N", help=shapes_help)
    trial_help = "a trial that takes longer counts as hanging (default: %(default)g)"
    add("--trial-seconds", type=seconds, default=600.0, metavar="SECONDS", help=trial_help)
    return made.parse_intermixed_args(arguments)


# ---- what is printed -------------------------------------------------------------------------------------------------


def trial_line(number: int, what: str, outcome: Outcome) -> str:
    if outcome.shows:
        return f"{number:3}  {what}: yes, {outcome.reason}"
    return f"{number:3}  {what}: no" + (f", it fails: {outcome.reason}" if outcome.reason else "")


def lines(report: Report) -> Iterator[str]:
    """The report in words, with rich's markup."""
    what = f"{report.task}, {report.strategies}"
    if report.symptom is None:
        right = ", ".join(RIGHT[symptom] for symptom in report.searched_for)
        yield f"[bold green]nothing wrong[/]: {escape(what)} {right}"
    else:
        assert report.whole is not None
        verb = VERBS[report.symptom]
        yield f"[bold red]{escape(what)} {verb}[/]: {escape(report.whole.reason or 'no reason given')}"
        yield from _place(report.whole)
        for culprit in report.culprits:
            yield from _culprit(culprit, verb)
        if report.together:
            yield f"[bold]only together[/]: {escape(', '.join(report.together))}: none of them {verb} alone"
        for option in report.options:
            instead = f"fails instead: {option.reason}" if option.reason else "makes it go away"
            yield f"[bold]option[/]: {escape(option.text)} {escape('shows it too' if option.shows else instead)}"
        rest = escape(named(report.rest))
        if report.rest_is_clean:
            yield f"[bold]the rest[/]: {len(report.rest)} submodules compile without it: {rest}"
        elif report.rest_is_clean is False:
            yield f"[bold]the rest[/] still shows it ({escape(report.rest_reason or 'no reason given')}): {rest}"
    for note in report.notes:
        yield f"[dim]note: {escape(note)}[/]"
    yield f"[dim]{report.trials} trials in {report.seconds:.0f} s on {report.device}[/]"


def _place(seen: Outcome) -> Iterator[str]:
    parts = [
        f"in the {seen.phase}" if seen.phase else "",
        f"at {shown(seen.where)}" if seen.where else "",
        f"with the batch {seen.batch}" if seen.batch else "",
    ]
    if any(parts):
        yield f"  {escape(' '.join(filter(None, parts)))}"
    if seen.code:
        yield f"    {escape(seen.code)}"


def _culprit(culprit: Culprit, verb: str) -> Iterator[str]:
    about = ", ".join(filter(None, (culprit.kind, culprit.source and shown(culprit.source))))
    path = culprit.path + (f" ({about})" if about else "")
    yield f"[bold]culprit[/]: {escape(path)}: compiled alone it {verb}: {escape(culprit.outcome.reason or '')}"
    yield from _place(culprit.outcome)
    if culprit.own_code:
        yield "  none of what it is made of shows it: it is its own code, or its parts in one graph"
    if culprit.copies:
        yield f"  so do, compiled together, {len(culprit.copies)} more like it: {escape(named(culprit.copies))}"


# ---- how to continue -------------------------------------------------------------------------------------------------


def modular_overrides(
    overrides: Sequence[str], strategies: Iterable[Strategy], site: Site, rest: Sequence[str]
) -> list[str]:
    """The trainer's overrides with ``modular`` for ``rest`` in the place of the strategy that compiled it before."""
    parts = {}
    for path in rest:
        if path != OPTIMIZER:
            request = next(given for region, given in site.requests.items() if holds(region, path))
            parts[path] = Part(how="whole", **request)
    kept: list[Strategy] = [Modular(parts=parts)] if parts else []
    kept += [each for each in strategies if each.stage not in (Stage.MODULE, Stage.OPTIMIZER)]
    kept += [each for each in strategies if each.stage is Stage.OPTIMIZER and OPTIMIZER in rest]
    chosen = ordered(kept)
    names = [each.name for each in chosen]
    given = [each for each in overrides if not re.match(r"[+~]*compile[=.]", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    for each in chosen:
        for name, value in _changed_options(each).items():
            sign = "+" if isinstance(value, Mapping) else ""  # a mapping of anything: its keys are new
            if isinstance(each, Modular):
                value = {path: {"how": part.how, **_changed_options(part)} for path, part in value.items()}
            given.append(f"{sign}compile.{each.name}.{name}={written(value)}")
    return given


def written(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        from trainer.sweep.plan import quoted

        return quoted(value)
    return str(value)


def _changed_options(options: Any) -> dict[str, Any]:
    """The options that are not at their default."""
    changed = {}
    for option in dataclasses.fields(options):
        factory = option.default_factory
        default = option.default if factory is dataclasses.MISSING else factory()
        if (value := getattr(options, option.name)) != default:
            changed[option.name] = value
    return changed


if __name__ == "__main__":
    with leaving():
        sys.exit(main())
