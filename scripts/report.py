"""Runs as a page to look at: ``crucible report RUNS -o report.html``

One self-contained HTML file: verdicts, tables, curves of total time that cross where compiling has paid for itself,
losses, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.arguments import STEPS_HELP, exit_code, parser, steps
from trainer.report import page, tables
from trainer.report.comparison import AT_STEPS, compare_runs
from trainer.report.runs import find
from trainer.telemetry.files import counted, written_whole

EXAMPLES = """\
examples:
  crucible report outputs/sweeps/2026-11-21_12-00-00
  crucible report outputs -o report.html --steps 1000,100000
  crucible report outputs/captioning 'outputs/gpt2/*/*' --baseline regional

RUN is a record file, a run's folder, a folder that holds such folders at any depth, or a glob of these.
Exit codes: 0 written, 2 wrong arguments or no runs.
"""


def main(arguments: list[str] | None = None) -> int:
    made = parser("report", __doc__ or "", EXAMPLES)
    add = made.add_argument
    add("runs", nargs="*", metavar="RUN", default=["outputs"], help="see below (default: outputs)")
    add("-o", "--output", default="report.html", metavar="FILE", help="the page (default: %(default)s)")
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: %(default)s)")
    add("--steps", type=steps, default=AT_STEPS, metavar="N,N", help=STEPS_HELP)
    options = made.parse_args(arguments)
    return exit_code(lambda _: report(options), place=options.output)


def report(options: argparse.Namespace) -> int:
    runs = find(options.runs, unreadable=lambda reason: print(f"warning: left out: {reason}", file=sys.stderr))
    comparisons = compare_runs(runs, baseline=options.baseline, at_steps=options.steps)
    text = page.render(comparisons, tables.scalings(runs))
    with written_whole(Path(options.output), "w") as file:
        file.write(text)
    counts = f"{counted(len(comparisons), 'workload')}, {counted(len(runs), 'run')}"
    print(f"{options.output}: {counts}, {len(text) / 1024:,.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
