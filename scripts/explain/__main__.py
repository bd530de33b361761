"""Say where the compiler breaks, repeats or leaves out a training step: ``crucible explain compile=whole``.

Takes the trainer's overrides, trains a few steps, and names each graph break and recompile with its line of code and
torch's own hints. Nothing of the training is kept; the only file is that of --json. For whoever has read of a graph
break or a recompile in a run's output, and wants it gone.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from rich import markup
from rich.console import Console

from scripts.arguments import composed_training, exit_code, parser, positive, require_writable
from scripts.explain import BATCHES, Explanation, Finding
from trainer.process import StopRequest, quick_exit, uninterrupted_import
from trainer.telemetry.source_lines import place_lines
from trainer.wording import counted

EXAMPLES = """\
examples:
  crucible explain                                     # the default task, as compile=whole would run it
  crucible explain task=captioning compile=regional
  crucible explain experiment=gpt2_smoke compile=whole --json why.json
  crucible explain compile=whole --batches 500         # more of an epoch's shapes

Breaks and recompiles need no Inductor: without a GPU aot_eager stands in for it.
Exit codes: 0 nothing wrong, 1 graph breaks, recompiles or failures found, 2 wrong arguments, 128 + signal interrupted.
"""
MAX_TEXTS = 4
"""Failed guards of one line that the terminal shows; JSON has all."""


def main(arguments: list[str] | None = None) -> int:
    made = parser("explain", __doc__ or "", EXAMPLES, overrides=True)
    add = made.add_argument
    add("--batches", type=positive, default=BATCHES, metavar="N", help=f"batches to train on (default: {BATCHES})")
    add("--json", type=Path, metavar="FILE", help="write everything there, for programs (default: nowhere)")
    parse = made.parse_intermixed_args
    return exit_code(lambda stop: explained(parse(arguments), stop), interrupted="nothing was written")


def explained(options: argparse.Namespace, stop: StopRequest) -> int:
    require_writable("--json", options.json)
    config, _ = composed_training(options.overrides, config_dir=options.config_dir, looks="explain looks at")
    if not config.compile:
        raise ValueError("compile=eager: compiles nothing, there is nothing to explain; try compile=whole")
    with Console(stderr=True, highlight=False).status(f"training {options.batches:,} batches"):
        with uninterrupted_import():
            from scripts.explain.run import explain

        explanation = explain(config, batches=options.batches, before_steps=stop.install)
        stop.check()  # an interrupt that a library swallowed may look like a failure of the compiler
    if options.json is not None:
        options.json.write_text(explanation.as_json(), encoding="utf-8")
    print_explanation(explanation, Console(highlight=False, soft_wrap=True))
    return 1 if explanation.problems else 0


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print what a reader needs, problems first; JSON holds the rest."""
    versions = f"torch {explanation.versions.get('torch') or 'n/a'} on {explanation.device or 'n/a'}"
    console.print(f"{explanation.task} under {explanation.strategies}, {versions}", markup=False)
    console.print(f"{explanation.batches:,} batches trained on", markup=False)
    for number, failure in enumerate(explanation.failures, 1):
        console.print(f"\n[red bold]does not compile {number}[/]: {markup.escape(failure)}")
    for number, one in enumerate(explanation.breaks, 1):
        _print_problem(f"[red bold]graph break {number}[/]", one, console)
    for number, recompile in enumerate(explanation.unexpected, 1):
        _print_problem(f"[yellow bold]recompile {number}[/]", recompile, console)
    console.print()
    if expected := sum(recompile.count for recompile in explanation.recompiles if recompile.expected):
        why = "(validation, copies of other sizes, shapes that buckets plan), which torch counts as recompiles"
        console.print(f"expected: {counted(expected, 'more graph')} {why}", markup=False)
    for note in explanation.notes:
        console.print(f"note: {note}", markup=False)
    for each in explanation.not_looked_at:
        console.print(f"not looked at: {each}", markup=False)
    console.print(f"[bold]{markup.escape(verdict(explanation))}[/]")


def verdict(explanation: Explanation) -> str:
    if not explanation.problems:
        return "nothing wrong: no graph breaks, no recompiles"
    counts = (
        (len(explanation.breaks), "graph break"),
        (sum(recompile.count for recompile in explanation.unexpected), "recompile"),
        (len(explanation.failures), "failure"),
    )
    return ", ".join(counted(number, name) for number, name in counts if number)


def _print_problem(title: str, one: Finding, console: Console) -> None:
    times = "" if one.count == 1 else f", {one.count} times"
    console.print(f"\n{title}{times}")
    for number, line in enumerate(place_lines(one.where)):
        console.print(line, markup=False, style="bold" if number else None)
    more = [f"and {len(one.texts) - MAX_TEXTS} more"] if len(one.texts) > MAX_TEXTS else []
    console.print(textwrap.indent("\n".join([*one.texts[:MAX_TEXTS], *more]), "  "), markup=False)


if __name__ == "__main__":
    with quick_exit():
        sys.exit(main())
