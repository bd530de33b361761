"""Would torch.compile help, and which strategy? Trains a task eager and compiled, or compares runs that are there:

  crucible compare task=captioning            train it eager, regional and whole, in turn, each in a fresh process
  crucible compare outputs/sweeps/<time>      compare the runs of a sweep, or any others

The second needs neither torch nor a GPU. For each workload (task and settings) a row for each arm (strategies and their
parameters): steady step, ratio to eager, warm-up from cold and from warm compile caches, the step at which compiling
has paid back, memory, and a verdict. --markdown and --json have all other figures.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scripts.arguments import STEPS_HELP, exit_code, parser, steps
from trainer.report import tables
from trainer.report.comparison import AT_STEPS, WorkloadComparison, compare_runs
from trainer.report.published import PublishedRow, check, rows_in
from trainer.report.runs import arm_of, find, workload_of

ABOUT = """\
~ no difference is shown; ± half of the range over the runs. docs/comparing.md says how each figure is made.

what is trained, with overrides: crucible train -m compile=eager,regional,whole OVERRIDES, whose options and folders it
has (crucible train --help); compile= with other values, or hydra.launcher.arms=[...], replaces the three. task=forces,
whose loss holds a gradient, trains eager and second_order.

Exit codes: 0 compared, 1 a training failed or a figure of --against neither holds nor is better, 2 refused
(wrong arguments, no records).
"""
OVERRIDE = re.compile(r"[+~]*[\w./@]+=")
"""What an override begins with; a folder may, too, where Hydra has named it."""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    asks = {"-h", "--help"} & set(given)
    if not asks and any(OVERRIDE.match(word) and not Path(word).exists() for word in given):
        from trainer import cli

        named = any(word.startswith(("compile=", "hydra.launcher.arms=")) for word in given)
        sys.argv[1:] = ["-m", *([] if named else [f"compile=eager,{_compiled(given)}"]), *given]
        cli.main()  # a sweep of the arms, which ends the process
        return 0
    made = parser("compare", __doc__ or "", ABOUT)
    add = made.add_argument
    runs_help = "records, run folders, folders to search, or globs of these; or overrides to train (default: outputs)"
    add("runs", nargs="*", metavar="RUN", default=["outputs"], help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", type=steps, default=AT_STEPS, metavar="N,N", help=STEPS_HELP)
    form = made.add_mutually_exclusive_group()
    for kind in ("markdown", "json"):
        form.add_argument(f"--{kind}", action="store_true", help=f"print {kind} instead of the tables")
    against_help = "earlier runs: do their figures hold in these? As crucible verify says it (default: nothing)"
    add("--against", metavar="RUN", help=against_help)
    options = made.parse_args(given)
    return exit_code(lambda _: compared(options))


def _compiled(given: Sequence[str]) -> str:
    """The strategies that are compared with eager: those that the task which ``given`` names can be compiled with."""
    from trainer.config import compose

    derives = False
    with contextlib.suppress(Exception):  # a sweep over tasks, or one that is not there: the sweep says so
        derives = compose([word for word in given if word.startswith(("task=", "experiment="))]).task.derives
    return "second_order" if derives else "regional,whole"


def compared(options: argparse.Namespace) -> int:
    runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    scaled = tables.scalings(runs)
    if options.markdown:
        print(tables.markdown(comparisons, scaled), end="")
    elif options.json:
        print(tables.as_json(comparisons))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=WIDTH, highlight=False)
        tables.show(comparisons, console)
        for name, table in scaled:
            for line in (f"scaling: {name}", *tables.plain_lines(table, console.width), ""):
                console.print(line, markup=False, soft_wrap=True)
    if options.against is None:
        return 0
    earlier = compare_runs(find([options.against]), baseline=options.baseline)
    lines, holds = against(comparisons, earlier)
    print("\n".join(lines), file=sys.stderr if options.markdown or options.json else sys.stdout)
    return int(not holds)


def against(comparisons: Sequence[WorkloadComparison], earlier: Sequence[WorkloadComparison]) -> tuple[list[str], bool]:
    """What to say of each arm of ``earlier``, and whether its figures hold in ``comparisons`` and no run has failed.

    Raises ValueError where they have no arm in common.
    """
    now = _arms(comparisons)
    then = {key: row for key, row in _arms(earlier).items() if row.records}
    if now.keys().isdisjoint(then):
        raise ValueError("none of these runs is of an arm of --against")
    lines, holds = [], True
    for key, row in then.items():
        name, here = f"{row.records[0].task} {row.arm}", now.get(key)
        if here is None or not here.records:
            lines += ["", f"{name}: {'not measured' if here is None else 'failed'}"]
            holds &= here is None
            continue
        checked, same = check(name, row, here, called="earlier")
        lines, holds = lines + checked, holds and same and not here.compared.cell.failed
    return lines, holds


def _arms(comparisons: Sequence[WorkloadComparison]) -> dict[object, PublishedRow]:
    """Rows by what their runs share."""
    rows = [(row, row.compared.cell.runs[0].record) for found in comparisons for row in rows_in(found)]
    return {(workload_of(first), arm_of(first)): row for row, first in rows}


if __name__ == "__main__":
    sys.exit(main())
