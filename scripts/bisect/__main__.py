"""Find the submodule whose compiled results are not eager's: ``crucible bisect compile=whole``.

Takes the trainer's overrides and compares what they compile with eager piece by piece, down to the smallest submodule
that differs. What does not compile at all is for ``crucible explain``.
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

from scripts.arguments import composed_training, exit_code, own_caches, parser
from scripts.bisect.search import OPTIMIZER, Culprit, Outcome, Report, Search, Site, named, searched
from strategies import Modular, Stage, Strategy
from strategies.base import holds
from strategies.compose import label, ordered
from strategies.modular import Part
from trainer.config import compose
from trainer.process import StopRequest, leaving
from trainer.telemetry.source import shown

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments or a step that cannot be compared, 3 it
takes several submodules together, 128 + signal interrupted.
"""
DIFFERS = "computes something else than eager"
PLAIN = re.compile(r"[\w./:+*?@%-]+")
"""Text that Hydra reads without quotes."""


def main(arguments: list[str] | None = None) -> int:
    parse = parser("bisect", __doc__ or "", EXAMPLES, overrides=True).parse_intermixed_args
    return exit_code(lambda stop: bisect(parse(arguments), stop), interrupted="nothing was found yet")


def bisect(options: argparse.Namespace, stop: StopRequest) -> int:
    """Search, suggest, print; progress goes to stderr."""
    config, overrides = composed_training(options.overrides, config_dir=options.config_dir, looks="bisect tries")
    strategies = list(config.compile.values())
    searched(strategies)
    report = Report(task=config.task.title, strategies=label(strategies))
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    sites: list[Site] = []
    with progress.status("building data and model") as status, own_caches("bisect", "scripts.bisect.bench"):
        from scripts.bisect.bench import Bench, with_config
        from scripts.explain.run import quiet_compiler

        def begins(number: int, what: str) -> None:
            stop.check()
            status.update(f"{number}  {what}")

        def use(bench: Bench) -> None:
            stop.install()
            sites.append(bench.site)
            Search(
                bench,
                report,
                begins=begins,
                ended=lambda number, what, outcome: progress.print(trial_line(number, what, outcome)),
            ).run()

        with quiet_compiler():  # what fails is in a trial's line
            with_config(config, use)
        stop.check()
    console = Console(highlight=False, soft_wrap=True)
    for line in lines(report):
        console.print(line)
    if report.rest_is_clean:
        suggested = modular_overrides(overrides, strategies, sites[0], report.rest)
        if options.config_dir is None:  # whose plugin.py need not bear to be run twice
            compose(suggested)  # what is suggested is a command that is understood
        folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
        command = shlex.join(["python", "-m", "trainer", *folder, *suggested])
        console.print(f"[bold]continue with[/]: {escape(command)}")
    return report.exit_code


# ---- what is printed -------------------------------------------------------------------------------------------------


def trial_line(number: int, what: str, outcome: Outcome) -> str:
    if outcome.differs:
        return f"{number:3}  {what}: differs, {outcome.reason}"
    return f"{number:3}  {what}: " + (f"not compared: {outcome.reason}" if outcome.reason else "equal")


def lines(report: Report) -> Iterator[str]:
    """The report in words, with rich's markup."""
    what = f"{report.task}, {report.strategies}"
    assert report.whole is not None
    if report.whole.differs:
        yield f"[bold red]{escape(what)} {DIFFERS}[/]: {_seen(report.whole)}"
        for culprit in report.culprits:
            yield from _culprit(culprit)
        if report.together:
            yield f"[bold]only together[/]: {escape(', '.join(report.together))}: none of them {DIFFERS} alone"
        rest = escape(named(report.rest))
        if report.rest_is_clean:
            yield f"[bold]the rest[/]: {len(report.rest)} submodules equal eager without it: {rest}"
        elif report.rest_is_clean is False:
            yield f"[bold]the rest[/] does not equal eager ({escape(report.rest_reason or '')}): {rest}"
    else:
        yield f"[bold green]nothing wrong[/]: {escape(what)} equals eager within its tolerance"
    for note in report.notes:
        yield f"[dim]note: {escape(note)}[/]"
    yield f"[dim]{report.trials} trial{'s' * (report.trials != 1)} in {report.seconds:.0f} s on {report.device}[/]"


def _seen(outcome: Outcome) -> str:
    return escape(f"{outcome.reason}, with the batch {outcome.batch}")


def _culprit(culprit: Culprit) -> Iterator[str]:
    about = ", ".join(filter(None, (culprit.kind, culprit.source and shown(culprit.source))))
    path = culprit.path + (f" ({about})" if about else "")
    yield f"[bold]culprit[/]: {escape(path)}: compiled alone it {DIFFERS}: {_seen(culprit.outcome)}"
    if culprit.own_code:
        yield "  none of what it is made of does: it is its own code, or its parts in one graph"
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
