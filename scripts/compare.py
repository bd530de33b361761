"""Would torch.compile help, and which strategy? Trains a task eager and compiled, or compares runs that are there:

  crucible compare task=captioning            train it eager, regional and whole, in turn, each in a fresh process
  crucible compare outputs/sweeps/<time>      compare the runs of a sweep, or any others

The second needs neither torch nor a GPU. For each workload (task and settings) a row for each arm (strategies and their
parameters): steady step, warm-up from cold and from warm compile caches, memory, energy, graphs, ratio to eager, the
step at which compiling has paid back, total time for given numbers of steps, and a verdict.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scripts.arguments import at_least, exit_code, parser
from trainer.report import drift, scaling, tables
from trainer.report.comparison import AT_STEPS, WorkloadComparison, compare_runs
from trainer.report.runs import find
from trainer.telemetry.files import written_whole

ABOUT = """\
how the figures are made:
  speed      the baseline's mean step time over the arm's, with a 95% interval: Student's t over three or more pairs of
             runs that share seed, round and start, else Welch's t over the runs of both sides; none for single runs
  ~          no difference is shown: the interval holds 1, there is none, or the runs of one arm are as far from each
             other (standard deviation) as the arms are
  ±          half the range from the smallest to the largest of the runs, over their median
  pays back  steps after which a cold start has caught up with the baseline, warm-up and all time in the compiler
             counted; none where no difference is shown
  s to N     seconds from the start of the process to the end of step N, without validation and checkpoints
  scaling    of runs on several numbers of devices: samples/s over as many times those of one device, of the same
             strategies; the median over rounds, ± half of their range
  verdict    of arms that are shown to be faster, the one of least total time

what is trained, with overrides: crucible train -m compile=eager,regional,whole OVERRIDES, whose options and folders it
has (crucible train --help); compile= with other values, or hydra.launcher.arms=[...], replaces the three.

  against    which arms moved since FILE was written by --json: the ratio beyond the tolerance and both intervals, the
             warm-up by a quarter and a second, memory beyond the tolerance, graphs, breaks and recompiles at all

Exit codes: 0 compared, 1 a training failed or an arm is worse than in --against, 2 refused (wrong arguments, no
records, runs that are unlike).
"""
OVERRIDE = re.compile(r"[+~]*[\w./@]+=")
"""What an override begins with; a folder may, too, where Hydra has named it."""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if any(OVERRIDE.match(word) and not Path(word).exists() for word in given):
        return train(given)
    options = parse(given)
    return exit_code(lambda _: compared(options))


def train(arguments: list[str]) -> int:
    """A sweep of the arms under these overrides; ends the process."""
    from trainer.cli import main

    named = any(word.startswith(("compile=", "hydra.launcher.arms=")) for word in arguments)
    sys.argv[1:] = ["-m", *([] if named else ["compile=eager,regional,whole"]), *arguments]
    main()
    return 0


def compared(options: argparse.Namespace) -> int:
    """Compare runs that are there."""
    runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=sorted(set(options.steps)))
    scaled = scaling.scalings(runs)
    if not options.allow_unlike:
        refuse_unlike(comparisons, several_devices=bool(scaled))
    texts = {"markdown": tables.markdown, "csv": tables.as_csv, "json": tables.as_json}
    targets = {kind: target for kind in texts if (target := getattr(options, kind)) is not None}
    for kind, target in targets.items():
        write(target, texts[kind](comparisons) + "".join(one.markdown() for one in scaled if kind == "markdown"))
    alone = "-" in targets.values()
    if not alone:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=WIDTH, highlight=False)
        tables.show(comparisons, console)
        for line in (line for found in scaled for line in found.lines(console.width)):
            console.print(line, markup=False, soft_wrap=True)
    if options.against is None:
        return 0
    moved = drift.against(comparisons, options.against, options.tolerance)
    for line in (*(line for each in moved for line in each.lines()), drift.summary(moved)):
        print(line, file=sys.stderr if alone else sys.stdout)
    return int(any(each.worse for each in moved))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    made = parser("compare", __doc__ or "", ABOUT)
    add = made.add_argument
    runs_help = "records, run folders, folders to search, or globs of these; or overrides to train (default: outputs)"
    steps_help = "steps to give total times for; the verdict looks as far as the largest (default: 500 2000 20000)"
    add("runs", nargs="*", metavar="RUN", help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", nargs="+", default=[str(steps) for steps in AT_STEPS], metavar="N", help=steps_help)
    for kind in ("markdown", "csv", "json"):
        add(f"--{kind}", metavar="FILE", help=f"also write {kind} there; - = to the output, alone (default: nowhere)")
    against_help = "what --json wrote of earlier runs: which arms are worse now? (default: compared with nothing)"
    add("--against", type=Path, metavar="FILE", help=against_help)
    tolerance_help = "by how much ratio and memory may differ from it (default: %(default)g)"
    add("--tolerance", type=at_least(0), default=drift.TOLERANCE, metavar="SHARE", help=tolerance_help)
    unlike_help = "compare runs of other devices, versions or precisions too (default: refused)"
    add("--allow-unlike", action="store_true", help=unlike_help)
    options = made.parse_args(arguments)
    # ``--steps 500 outputs`` is what people write; argparse takes the folder for a number of steps.
    options.runs = [*options.runs, *(word for word in options.steps if not word.isdecimal())] or ["outputs"]
    options.steps = [int(word) for word in options.steps if word.isdecimal()] or list(AT_STEPS)
    if [options.markdown, options.csv, options.json].count("-") > 1:
        made.error("only one of --markdown, --csv and --json can be -")
    return options


def refuse_unlike(comparisons: Sequence[WorkloadComparison], *, several_devices: bool = False) -> None:
    """Raise ValueError when runs of a workload differ in what decides their speed, or no two are of one workload, nor
    of one training on ``several_devices`` and on one."""
    for found in comparisons:
        if found.unlike:
            raise ValueError(
                f"runs of {found.workload} are unlike: {'; '.join(found.unlike)}. Name the runs that belong together, "
                "or use --allow-unlike"
            )
    if several_devices:
        return
    if len(comparisons) > 1 and all(
        len(found.rows) == 1 and found.task == comparisons[0].task for found in comparisons
    ):
        raise ValueError(
            "no two of these runs are of one workload, which makes nothing to compare: "
            f"{', '.join(found.workload for found in comparisons)}. Use --allow-unlike to see each by itself"
        )


def write(target: str, text: str) -> None:
    """Write a file whole, or to the output for ``-``."""
    if target == "-":
        sys.stdout.write(text)
        return
    with written_whole(Path(target), "w") as file:
        file.write(text)
    print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
