"""Find the submodule whose compiled results are not eager's: ``crucible bisect compile=whole``.

Takes the trainer's overrides and compares what they compile with eager at the first call of each region, and what a
region calls where that is not eager's or does not compile, down to the smallest submodule at fault. For whoever has a
loss that is another one when compiled, and wants to know which layer it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from scripts.arguments import composed_training, exit_code, parser
from scripts.bisect.search import MAX_SHAPES, ComparedModule, Report, searched
from strategies import Modular, Stage, Strategy
from strategies.base import label
from trainer.advice import program
from trainer.process import StopRequest, quick_exit, uninterrupted_import
from trainer.wording import counted, first_few

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments or nothing that can be compared,
128 + signal interrupted.
"""
NOTHING_WRONG, FOUND = 0, 1
DEFAULTS = {"backend": "inductor", "fullgraph": True, "dynamic": None, "options": {}}
"""Arguments of a part of ``modular`` that nobody sets."""


def main(arguments: list[str] | None = None) -> int:
    parse = parser("bisect", __doc__ or "", EXAMPLES, overrides=True).parse_intermixed_args
    return exit_code(lambda stop: bisect(parse(arguments), stop), interrupted="nothing was found yet")


def bisect(options: argparse.Namespace, stop: StopRequest) -> int:
    """Search, suggest, print; progress goes to stderr."""
    config, overrides = composed_training(options.overrides, config_dir=options.config_dir, looks="bisect looks at")
    given = list(config.compile.values())
    strategies, notes = searched(given)
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console = Console(highlight=False, soft_wrap=True)
    numbers = itertools.count(1)
    with progress.status("building data and model"):
        with uninterrupted_import():
            from scripts.bisect.module_comparer import bisect_config
            from scripts.explain.run import ONE_DEVICE, quiet_compiler, several_devices

        def saw(look: ComparedModule) -> None:
            stop.check()
            progress.print(look_line(next(numbers), look))

        with quiet_compiler():  # what fails is in a look's line
            report = bisect_config(config, strategies, saw, stop.install)
        stop.check()
    for line in lines(report, f"{config.task.title}, {label(given)}"):
        console.print(line)
    for note in [*notes, *([ONE_DEVICE.format("looked at")] if several_devices(config) else [])]:
        console.print(f"[dim]note: {escape(note)}[/]")
    if not report.culprits:
        return NOTHING_WRONG
    suggested = modular_overrides(overrides, given, report.arguments, report.equal_modules)
    folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    command = shlex.join([*program(), *folder, *suggested])
    console.print(f"[bold]continue with[/]: {escape(command)}")
    return FOUND


# ---- what is printed -------------------------------------------------------------------------------------------------


def look_line(number: int, look: ComparedModule) -> str:
    if look.skipped is not None:
        return f"{number:3}  {look.path}: not compared: {look.skipped}"
    return f"{number:3}  {look.path}: {look.wrong or 'equal'}"


def lines(report: Report, what: str) -> Iterator[str]:
    """The report in words, with rich's markup; ``what`` was searched."""
    culprits = report.culprits
    if not culprits:
        shapes = f"({counted(report.batches, 'shape')} of batch, at most {MAX_SHAPES} are looked at)"
        yield f"[bold green]nothing wrong[/]: {escape(what)} equals eager within its tolerance {shapes}"
    else:
        yield f"[bold red]{escape(what)} does not equal eager[/], with the batch {escape(report.batch)}"
    alike: dict[str, list[ComparedModule]] = {}
    for look in culprits:
        alike.setdefault(look.about or look.path, []).append(look)
    for first, *others in alike.values():
        about = f" ({first.about})" if first.about else ""
        yield f"[bold]culprit[/]: {escape(f'{first.path}{about}: {first.wrong}')}"
        if first.children:
            yield "  nothing that it calls is at fault alone: it is its own code, or its parts in one graph"
        if others:
            paths = first_few([look.path for look in others])
            yield f"  so {'is' if len(others) == 1 else 'are'} {len(others)} more of its class: {escape(paths)}"
    if culprits and (rest := report.equal_modules):
        equal = "1 submodule equals" if len(rest) == 1 else f"{len(rest)} submodules equal"
        yield f"[bold]the rest[/]: {equal} eager: {escape(first_few(rest))}"
    for look in report.not_compared:
        yield f"[dim]not compared: {escape(f'{look.path}: {look.skipped}')}[/]"
    if report.never_called:
        yield f"[dim]never called in these steps: {escape(first_few(report.never_called))}[/]"


# ---- how to continue -------------------------------------------------------------------------------------------------


def modular_overrides(
    overrides: Sequence[str], strategies: Iterable[Strategy], arguments: Mapping[str, Any], rest: Sequence[str]
) -> list[str]:
    """The trainer's overrides with ``modular`` for ``rest`` in the place of the strategy that compiled it before; each
    part has the ``torch.compile`` arguments of its region, by whose path they are in ``arguments``."""
    from strategies.region import is_ancestor  # which imports torch

    parts = {}
    for path in rest:
        its = next(given for region, given in arguments.items() if is_ancestor(region, path))
        parts[path] = {"how": "whole", **{name: each for name, each in its.items() if each != DEFAULTS[name]}}
    gone = {each.name for each in strategies if each.stage is Stage.MODULE}
    names = ([Modular.name] if parts else []) + [each.name for each in strategies if each.name not in gone]
    keys = "|".join([r"compile=", *(rf"compile\.{name}[.=]" for name in gone)])
    given = [each for each in overrides if not re.match(rf"[+~]*({keys})", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    # As Hydra's command line reads them: JSON whose keys have no quotes.
    written = re.sub(r'"([^"]+)":', r"\1:", json.dumps(parts, separators=(",", ":")))
    return given + ([f"+compile.{Modular.name}.parts={written}"] if parts else [])


if __name__ == "__main__":
    with quick_exit():
        sys.exit(main())
