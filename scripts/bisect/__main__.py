"""Find the submodule whose compiled results are not eager's: ``crucible bisect compile=whole``.

Takes the trainer's overrides and compares what they compile with eager piece by piece, down to the smallest submodule
that differs. What does not compile at all is for ``crucible explain``.
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
from scripts.bisect.search import MAX_SHAPES, OPTIMIZER, Outcome, Report, Search, named, searched
from strategies import Modular, Stage, Strategy
from strategies.base import holds, label
from trainer.process import StopRequest, importing, leaving

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments or a step that cannot be compared, 3 it
takes several submodules together, 128 + signal interrupted.
"""
NOTHING_WRONG, FOUND, ONLY_TOGETHER = 0, 1, 3
DEFAULTS = {"backend": "inductor", "fullgraph": True, "dynamic": None, "options": {}}
"""Arguments of a part of ``modular`` that nobody sets."""
DIFFERS = "computes something else than eager"


def main(arguments: list[str] | None = None) -> int:
    parse = parser("bisect", __doc__ or "", EXAMPLES, overrides=True).parse_intermixed_args
    return exit_code(lambda stop: bisect(parse(arguments), stop), interrupted="nothing was found yet")


def bisect(options: argparse.Namespace, stop: StopRequest) -> int:
    """Search, suggest, print; progress goes to stderr."""
    config, overrides = composed_training(options.overrides, config_dir=options.config_dir, looks="bisect tries")
    given = list(config.compile.values())
    strategies, notes = searched(given)
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console = Console(highlight=False, soft_wrap=True)
    numbers = itertools.count(1)
    with progress.status("building data and model") as status:
        with importing():
            from scripts.bisect.bench import Bench, with_config
            from scripts.explain.run import ONE_DEVICE, quiet_compiler, several_devices

        def use(bench: Bench) -> tuple[Report, dict[str, Any]]:
            def trial(paths: Sequence[str]) -> Outcome:
                stop.check()
                number = next(numbers)
                status.update(f"{number}  {named(paths)}")
                outcome = bench.trial(paths)
                progress.print(trial_line(number, named(paths), outcome))
                return outcome

            stop.install()
            return Search(bench.everything, trial).run(), bench.arguments

        with quiet_compiler():  # what fails is in a trial's line
            report, arguments = with_config(config, strategies, use)
        stop.check()
    for line in lines(report, f"{config.task.title}, {label(given)}"):
        console.print(line)
    for note in [*notes, *([ONE_DEVICE.format("tried")] if several_devices(config) else [])]:
        console.print(f"[dim]note: {escape(note)}[/]")
    if report.rest_outcome is not None:
        suggested = modular_overrides(overrides, given, arguments, report.rest)
        folder = [] if options.config_dir is None else ["--config-dir", options.config_dir]
        what, module = ("continue with", "trainer") if report.rest_is_clean else ("search on with", "scripts.bisect")
        console.print(f"[bold]{what}[/]: {escape(shlex.join(['python', '-m', module, *folder, *suggested]))}")
    if not report.whole.differs:
        return NOTHING_WRONG
    return ONLY_TOGETHER if report.culprit is None else FOUND


# ---- what is printed -------------------------------------------------------------------------------------------------


def trial_line(number: int, what: str, outcome: Outcome) -> str:
    if outcome.differs:
        return f"{number:3}  {what}: differs, {outcome.reason}"
    return f"{number:3}  {what}: " + (f"not compared: {outcome.reason}" if outcome.reason else "equal")


def lines(report: Report, what: str) -> Iterator[str]:
    """The report in words, with rich's markup; ``what`` was searched."""
    if not report.whole.differs:
        shapes = f"(in {MAX_SHAPES} shapes of batch at most)"
        yield f"[bold green]nothing wrong[/]: {escape(what)} equals eager within its tolerance {shapes}"
        return
    yield f"[bold red]{escape(what)} {DIFFERS}[/]: {_seen(report.whole)}"
    if (culprit := report.culprit) is None or report.outcome is None:
        yield f"[bold]only together[/]: no submodule {DIFFERS} alone"
        return
    path = culprit.path + (f" ({culprit.about})" if culprit.about else "")
    yield f"[bold]culprit[/]: {escape(path)}: compiled alone it {DIFFERS}: {_seen(report.outcome)}"
    if culprit.children:
        yield "  none of what it is made of does: it is its own code, or its parts in one graph"
    if report.copies:
        yield f"  the rest differs with the {len(report.copies)} more of its class: {escape(named(report.copies))}"
    if report.rest:
        rest = escape(named(report.rest))
        if report.rest_is_clean:
            yield f"[bold]the rest[/]: {len(report.rest)} submodules equal eager without it: {rest}"
        else:
            why = (report.rest_outcome and report.rest_outcome.reason) or ""
            yield f"[bold]the rest[/] does not equal eager ({escape(why)}): {rest}"


def _seen(outcome: Outcome) -> str:
    return escape(f"{outcome.reason}, with the batch {outcome.batch}")


# ---- how to continue -------------------------------------------------------------------------------------------------


def modular_overrides(
    overrides: Sequence[str], strategies: Iterable[Strategy], arguments: Mapping[str, Any], rest: Sequence[str]
) -> list[str]:
    """The trainer's overrides with ``modular`` for ``rest`` in the place of the strategy that compiled it before; each
    part has the ``torch.compile`` arguments of its region, by whose path they are in ``arguments``."""
    parts = {}
    for path in rest:
        if path != OPTIMIZER:
            its = next(given for region, given in arguments.items() if holds(region, path))
            parts[path] = {"how": "whole", **{name: each for name, each in its.items() if each != DEFAULTS[name]}}
    gone = {each.name for each in strategies if each.stage is Stage.MODULE}
    gone |= {each.name for each in strategies if each.stage is Stage.OPTIMIZER and OPTIMIZER not in rest}
    names = ([Modular.name] if parts else []) + [each.name for each in strategies if each.name not in gone]
    keys = "|".join([r"compile=", *(rf"compile\.{name}[.=]" for name in gone)])
    given = [each for each in overrides if not re.match(rf"[+~]*({keys})", each)]
    given.append(f"compile=[{','.join(names)}]" if len(names) > 1 else f"compile={(names or ['eager'])[0]}")
    # As Hydra's command line reads them: JSON whose keys have no quotes.
    written = re.sub(r'"([^"]+)":', r"\1:", json.dumps(parts, separators=(",", ":")))
    return given + ([f"+compile.{Modular.name}.parts={written}"] if parts else [])


if __name__ == "__main__":
    with leaving():
        sys.exit(main())
