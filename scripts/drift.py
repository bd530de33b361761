"""Has a strategy become slower? Compares new runs with the rows of a reference file:

crucible drift outputs/gpt2 --update        once: keep what these runs came to
crucible drift outputs/tonight              every night: what has moved since, beyond noise
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.arguments import at_least, exit_code, parser
from trainer.report import drift
from trainer.report.runs import find

ABOUT = """\
what counts as moved:
  ratio        eager's mean step over the arm's: differs by more than --tolerance, and the 95% intervals are apart
  warm-up      of cold starts: by more than --warmup-tolerance and a second, and the ranges of the runs are apart
  peak memory  of the device, by more than --tolerance
  counts       graphs, graph breaks, recompiles, cache misses: any difference
Rows are kept for each device, host processor and major version of torch, Triton and CUDA (docs/comparing.md).

Exit codes: 0 nothing got worse, 1 a row got worse or failed, 2 refused (no runs, no reference for their machine).
"""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(arguments)
    return exit_code(lambda _: compared(options), place=options.against)


def compared(options: argparse.Namespace) -> int:
    """Compare with the reference, or write it."""
    runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
    if options.update:
        return drift.update(runs, options.against)
    tolerances = drift.Tolerances(ratio=options.tolerance, warmup=options.warmup_tolerance)
    return drift.against(runs, options.against, tolerances, strict=options.strict)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("drift", __doc__ or "", ABOUT)
    add, share = made.add_argument, at_least(0)
    add(
        "runs",
        nargs="*",
        default=["outputs"],
        metavar="RUN",
        help="runs, as for crucible compare (default: outputs)",
    )
    against_help = "the reference file, JSON (default: %(default)s)"
    add("--against", type=Path, default=Path("drift.json"), metavar="FILE", help=against_help)
    add("--update", action="store_true", help="write the rows of these runs into that file (default: compare with it)")
    tolerance_help = "of ratio and memory, a share of what they were (default: %(default)g)"
    add("--tolerance", type=share, default=0.03, metavar="SHARE", help=tolerance_help)
    warmup_help = "of the warm-up's seconds, likewise (default: %(default)g)"
    add("--warmup-tolerance", type=share, default=0.25, metavar="SHARE", help=warmup_help)
    strict_help = "exit with 1 too when a row got better, or could not be judged (default: 0 then)"
    add("--strict", action="store_true", help=strict_help)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
