"""Runs side by side: ``python -m scripts.compare outputs/sweeps/2026-11-21_12-10-23``

For each workload (task and settings) a row for each arm (strategies and their parameters): steady step, warm-up from
cold and from warm compile caches, memory, energy, graphs, ratio to eager, the step at which compiling has paid back,
total time for given numbers of steps, and a verdict. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from trainer.evidence import tables
from trainer.evidence.comparison import AT_STEPS, WorkloadComparison, compare
from trainer.evidence.rows import Row
from trainer.evidence.runs import find
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
  verdict    of arms that are shown to be faster, the one of least total time

Exit codes: 0 compared, 2 refused (wrong arguments, no records, runs that are unlike).
"""
NARROWEST = 100
"""Characters of a line where the output is no terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(arguments)
    try:
        runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
        comparisons = compare(runs, baseline=options.baseline, at_steps=sorted(set(options.steps)))
        if not options.allow_unlike:
            refuse_unlike(comparisons)
        for found in comparisons:
            sort(found, options.sort)
        for target, text in (
            (options.markdown, tables.markdown),
            (options.csv, tables.as_csv),
            (options.json, tables.as_json),
        ):
            if target is not None:
                write(target, text(comparisons))
        if options.tensorboard is not None:
            for_tensorboard(comparisons, options.tensorboard)
        if "-" not in (options.markdown, options.csv, options.json):
            console = Console(highlight=False)
            tables.show(comparisons, console if console.is_terminal else Console(width=NARROWEST, highlight=False))
        sys.stdout.flush()
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # ``| head`` has read enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="records, run folders, folders to search, or globs of these (default: outputs)",
    )
    parser.add_argument("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    parser.add_argument(
        "--steps",
        nargs="+",
        default=[str(steps) for steps in AT_STEPS],
        metavar="N",
        help="steps to tell total times for; the verdict looks as far as the largest (default: 500 2000 20000)",
    )
    parser.add_argument(
        "--sort", choices=tuple(SORTS), default="given", help="order of the arms after the baseline (default: given)"
    )
    for kind in ("markdown", "csv", "json"):
        parser.add_argument(f"--{kind}", metavar="FILE", help=f"also write {kind} there; - = to the output, alone")
    parser.add_argument("--tensorboard", metavar="DIR", help="also write tables and curves there, as a run of its own")
    parser.add_argument(
        "--allow-unlike",
        action="store_true",
        help="compare runs of other devices, versions or precisions too, marked as unlike",
    )
    options = parser.parse_args(arguments)
    # ``--steps 500 outputs`` is what people write; argparse takes the folder for a number of steps.
    options.runs = [*options.runs, *(word for word in options.steps if not word.isdecimal())] or ["outputs"]
    options.steps = [int(word) for word in options.steps if word.isdecimal()] or list(AT_STEPS)
    if [options.markdown, options.csv, options.json].count("-") > 1:
        parser.error("only one of --markdown, --csv and --json can be -")
    return options


def refuse_unlike(comparisons: Sequence[WorkloadComparison]) -> None:
    """Raise ValueError when runs of a workload differ in what decides their speed, or no two are of one workload."""
    for found in comparisons:
        if found.unlike:
            raise ValueError(
                f"runs of {found.workload} are unlike: {'; '.join(found.unlike)}. Name the runs that belong together, "
                "or go on with --allow-unlike"
            )
    single = [found for found in comparisons if len(found.rows) == 1]
    if len(single) > 1 and len(single) == len(comparisons) and len({found.task for found in comparisons}) == 1:
        raise ValueError(
            "no two of these runs are of one workload, which makes nothing to compare: "
            f"{', '.join(found.workload for found in comparisons)}. Go on with --allow-unlike to see each by itself"
        )


def sort(found: WorkloadComparison, order: str) -> None:
    """Put the rows in ``order``, the baseline first; what has no figure comes last."""
    key = SORTS[order]
    if key is None:
        return
    base = found.baseline_row
    others = [row for row in found.rows if row is not base]
    known = sorted((row for row in others if key(row) is not None), key=lambda row: key(row) or 0.0)
    found.rows[:] = [*([base] if base else []), *known, *(row for row in others if key(row) is None)]


def _total(row: Row) -> float | None:
    return row.total_seconds[max(row.total_seconds)] if row.total_seconds else None


SORTS: dict[str, Callable[[Row], float | None] | None] = {
    "given": None,
    "step": lambda row: None if row.ratio is None else -row.ratio.value,
    "total": _total,
    "warm-up": lambda row: None if row.cold_warmup_seconds is None else row.cold_warmup_seconds.median,
    "memory": lambda row: row.peak_device_memory_gib,
    "pays-back": lambda row: row.break_even_steps,
}
"""Figure that each value of ``--sort`` goes by, the smallest first."""


def write(target: str, text: str) -> None:
    """Write a file whole, or to the output for ``-``. Raises ValueError where that cannot be done."""
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        with written_whole(Path(target), "w") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{target}: {error.strerror}") from error
    print(f"wrote {target}", file=sys.stderr)


def for_tensorboard(comparisons: Sequence[WorkloadComparison], target: str) -> None:
    """Write what a sweep leaves in its ``summary``. Raises ValueError where that cannot be done."""
    from trainer import sweep_pages

    try:
        missing = sweep_pages.write(comparisons, Path(target))
    except OSError as error:
        raise ValueError(f"{target}: {error.strerror}") from error
    print(f"wrote {target}", file=sys.stderr)
    if missing is not None:
        print(missing, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
