"""Runs as a page to look at: ``crucible report RUNS -o report.html``

One self-contained HTML file: verdicts, tables, curves of total time that cross where compiling has paid for itself,
losses, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from scripts.arguments import exit_code, parser, sort_runs_and_steps
from trainer.report import page, pictures, tables
from trainer.report.comparison import compare_runs
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
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    return exit_code(lambda _: report(options, shlex.join(["crucible", "report", *given])), place=options.output)


def report(options: argparse.Namespace, command: str) -> int:
    """Write the page that ``command`` makes, and the pictures if asked for."""
    runs = find(options.runs, unreadable=lambda reason: print(f"warning: left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    text = page.render(comparisons, title=options.title, command=command, scalings=tables.scalings(runs))
    if options.output == "-":
        sys.stdout.write(text)
    else:
        with written_whole(Path(options.output), "w") as file:
            file.write(text)
        counts = f"{page.counted(len(comparisons), 'workload')}, {page.counted(len(runs), 'run')}"
        print(f"{options.output}: {counts}, {len(text) / 1024:,.0f} KiB")
    if options.pictures is not None:
        files = pictures.write(comparisons, options.pictures)
        print(f"{options.pictures}: {page.counted(len(files), 'picture')}", file=sys.stderr)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    made = parser("report", __doc__ or "", EXAMPLES)
    add, title = made.add_argument, "What compiling costs, and what it gives"
    steps_help = "steps to give total times for (default: 500 2000 20000)"
    add("runs", nargs="*", metavar="RUN", help="see below (default: outputs)")
    add("-o", "--output", default="report.html", metavar="FILE", help="the page; - = the output (default: %(default)s)")
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: %(default)s)")
    add("--steps", nargs="+", default=[], metavar="N", help=steps_help)
    add("--title", default=title, metavar="TEXT", help="heading of the page (default: %(default)s)")
    add("--pictures", type=Path, metavar="DIR", help="also write the pictures there, as PNG (default: nowhere)")
    options = made.parse_args(arguments)
    sort_runs_and_steps(options)
    return options


if __name__ == "__main__":
    sys.exit(main())
