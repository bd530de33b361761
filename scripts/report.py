"""Runs as a page to look at: ``crucible report RUNS -o report.html``

One self-contained HTML file: verdicts, curves of total time that cross where compiling has paid for itself, bars, step
times, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from scripts.arguments import exit_code, parser
from trainer.report import page, pictures, scaling
from trainer.report.comparison import AT_STEPS, compare_runs
from trainer.report.runs import find
from trainer.telemetry.files import written_whole

EXAMPLES = """\
examples:
  crucible report outputs/sweeps/2026-11-21_12-00-00
  crucible report outputs -o report.html --steps 1000 100000
  crucible report outputs/captioning 'outputs/gpt2/*/*' --baseline regional --pictures docs/pictures

RUN is a record file, a run's folder, a folder that holds such folders at any depth, or a glob of these.
Exit codes: 0 written, 2 wrong arguments or no runs.
"""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda _: report(options), place=options.output)


def report(options: argparse.Namespace) -> int:
    """Write the page, and the pictures if asked for."""
    unreadable: list[str] = []
    runs = find(options.runs, unreadable=unreadable.append)
    for reason in unreadable:
        print(f"warning: left out: {reason}", file=sys.stderr)
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    scaled = scaling.scalings(runs)
    text = page.render(comparisons, title=options.title, command=options.command, scalings=scaled)
    if options.output == "-":
        sys.stdout.write(text)
    else:
        target = Path(options.output)
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target, "w") as file:
            file.write(text)
        counts = f"{page.counted(len(comparisons), 'workload')}, {page.counted(len(runs), 'run')}"
        print(f"{target}: {counts}, {len(text) / 1024:,.0f} KiB")
    if options.pictures is not None:
        files = pictures.write(comparisons, options.pictures)
        print(f"{options.pictures}: {page.counted(len(files), 'picture')}", file=sys.stderr)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options from ``arguments``; ``command`` is what makes the page again, without pictures beside it."""
    beside = argparse.ArgumentParser(add_help=False)
    pictures_help = "also write the pictures there, as PNG (default: nowhere)"
    beside.add_argument("--pictures", type=Path, metavar="DIR", help=pictures_help)
    made = parser("report", __doc__ or "", EXAMPLES)
    made.add_argument("runs", nargs="*", default=["outputs"], metavar="RUN", help="see below (default: outputs)")
    add = made.add_argument
    add(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        help="the page; - = the output (default: %(default)s)",
    )
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: %(default)s)")
    steps_help = "steps to give total times for (default: 500 2000 20000)"
    add("--steps", type=int, nargs="+", default=list(AT_STEPS), metavar="N", help=steps_help)
    title = "What compiling costs, and what it gives"
    add("--title", default=title, metavar="TEXT", help="heading of the page (default: %(default)s)")
    add("--pictures", type=Path, metavar="DIR", help=pictures_help)
    options = made.parse_args(arguments)
    options.command = shlex.join(["crucible", "report", *beside.parse_known_args(arguments)[1]])
    return options


if __name__ == "__main__":
    sys.exit(main())
