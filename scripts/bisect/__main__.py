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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from scripts.arguments import check_file, composed_training, exit_code, parser, positive, seconds
from scripts.bisect.search import OPTIMIZER, SYMPTOMS, Culprit, Outcome, Report, Search, Site, holds, named, searched
from scripts.bisect.worker import RemoteBench
from strategies import Modular, Stage, Strategy
from strategies.compose import label, ordered
from strategies.modular import Part
from trainer.process import keep_streams, leaving
from trainer.telemetry.source import shown

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager --for differs
  crucible bisect compile=whole --for slower --shapes 1 --json found.json

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
    check_file("json", options.json)
    config, overrides = composed_training(options.overrides, config_dir=options.config_dir, looks="bisect tries")
    strategies = list(config.compile.values())
    searched(strategies)
    report = Report(task=config.task.title, strategies=label(strategies), command=overrides)
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with (
        progress.status("building data and model") as status,
        RemoteBench(
            overrides, config_dir=options.config_dir, shapes=options.shapes, trial_seconds=options.trial_seconds
        ) as bench,
    ):
        search = Search(
            bench,
            report,
            begins=lambda what: status.update(f"{what} ({report.trials} trials)"),
            ended=lambda number, what, outcome: progress.print(trial_line(number, what, outcome)),
        )
        search.run(SYMPTOMS if options.symptom is None else (options.symptom,))
        if report.symptom is not None:
            suggest(report, bench.site, strategies, overrides, config_dir=options.config_dir)
    if options.json is not None:
        options.json.write_text(report.as_json(), encoding="utf-8")
    console = Console()
    for line in lines(report):
        console.print(line, highlight=False, soft_wrap=True)
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
    add("--json", type=Path, metavar="FILE", help="write everything there, for programs (default: nowhere)")
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
        yield from _problem(report, what, VERBS[report.symptom])
    for note in report.notes:
        yield f"[dim]note: {escape(note)}[/]"
    yield f"[dim]{report.trials} trials in {report.seconds:.0f} s on {report.device}[/]"


def _problem(report: Report, what: str, verb: str) -> Iterator[str]:
    assert report.whole is not None
    yield f"[bold red]{escape(what)} {verb}[/]: {escape(report.whole.reason or 'no reason given')}"
    yield from _place(report.whole)
    for culprit in report.culprits:
        yield from _culprit(culprit, verb)
    if report.together:
        yield f"[bold]only together[/]: {escape(', '.join(report.together))}: none of them {verb} alone"
    for option in report.options:
        instead = f"fails instead: {option.reason}" if option.reason else "makes it go away"
        kind = "compiler" if option.backend else "option"
        yield f"[bold]{kind}[/]: {escape(option.text)} {escape('shows it too' if option.shows else instead)}"
    rest = escape(named(report.rest))
    if report.rest_is_clean:
        yield f"[bold]the rest[/]: {len(report.rest)} submodules compile without it: {rest}"
    elif report.rest_is_clean is False:
        yield f"[bold]the rest[/] still shows it ({escape(report.rest_reason or 'no reason given')}): {rest}"
    for line in report.suggestions:
        yield f"[bold]continue with[/]: {escape(line)}"


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


def suggest(
    report: Report, site: Site, strategies: Sequence[Strategy], overrides: Sequence[str], *, config_dir: str | None
) -> None:
    """Add commands to the report: with the option that makes it go away, with the rest compiled."""
    from trainer.config import compose

    suggested = [
        with_changes(overrides, strategies, option.changes)
        for option in report.options
        if not option.shows and option.reason is None and not option.backend
    ]
    if report.rest_is_clean:
        suggested.append(modular_overrides(overrides, strategies, site, report.rest))
    if not suggested:
        report.notes.append("no setting was found that leaves it out and compiles the rest; compile=eager does without")
    for given in suggested:
        if config_dir is None:  # whose plugin.py need not bear to be run twice
            compose(given)  # what is suggested is a command that is understood
        folder = [] if config_dir is None else ["--config-dir", config_dir]
        report.suggestions.append(shlex.join(["python", "-m", "trainer", *folder, *given]))


def modular_overrides(
    overrides: Sequence[str], strategies: Iterable[Strategy], site: Site, rest: Sequence[str]
) -> list[str]:
    """The trainer's overrides with ``modular`` for ``rest`` in the place of the strategy that compiled it before."""
    modules = [path for path in rest if path != OPTIMIZER]
    parts = {}
    for path in wildcards(modules, site.paths):
        example = next(one for one in modules if _matches(one, path))
        request = next(given for region, given in site.requests.items() if holds(region, example))
        parts[path] = Part(how="whole", **request)
    kept = [
        each
        for each in strategies
        if each.stage is not Stage.MODULE and (each.stage is not Stage.OPTIMIZER or OPTIMIZER in rest)
    ]
    return with_strategies(overrides, [*kept, *([Modular(parts=parts)] if parts else [])])


def with_changes(overrides: Sequence[str], strategies: Iterable[Strategy], changes: Mapping[str, Any]) -> list[str]:
    """The trainer's overrides with other options for what is handed to the compiler."""

    def changed(each: Strategy) -> Strategy:
        if isinstance(each, Modular):
            return Modular(parts={name: dataclasses.replace(part, **changes) for name, part in each.parts.items()})
        return dataclasses.replace(each, **changes) if each.stage is Stage.MODULE else each

    return with_strategies(overrides, map(changed, strategies))


def with_strategies(overrides: Sequence[str], strategies: Iterable[Strategy]) -> list[str]:
    """The trainer's overrides with these strategies in the place of those that they name."""
    chosen = ordered(strategies)
    names = [each.name for each in chosen]
    given = [each for each in overrides if not re.match(r"[+~]*compile[=.]", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    for each in chosen:
        for name, value in _changed_options(each).items():
            sign = "+" if isinstance(value, Mapping) else ""  # a mapping of anything: its keys are new
            if isinstance(each, Modular):
                value = {path: {"how": part.how, **_changed_options(part, skip="how")} for path, part in value.items()}
            given.append(f"{sign}compile.{each.name}.{name}={written(value)}")
    return given


def wildcards(paths: Sequence[str], every: Sequence[str]) -> list[str]:
    """``paths`` with ``*`` for the numbers of those that differ in nothing else, where no other path matches too."""
    alike: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        alike[".".join("*" if name.isdigit() else name for name in path.split("."))].append(path)
    result: list[str] = []
    for pattern, matching in alike.items():
        exact = len(matching) > 1 and {path for path in every if _matches(path, pattern)} == set(matching)
        result += [pattern] if exact else matching
    return result


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


def _changed_options(options: Any, *, skip: str = "") -> dict[str, Any]:
    """The options that are not at their default."""
    values = {option.name: (getattr(options, option.name), option) for option in dataclasses.fields(options)}
    return {name: value for name, (value, option) in values.items() if name != skip and value != _default(option)}


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


if __name__ == "__main__":
    with leaving():
        sys.exit(main())
