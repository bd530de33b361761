"""Runs side by side: ``python -m scripts.compare outputs/sweeps/2026-11-21_12-10-23``

For each workload (task and settings) a row for each arm (strategies and their parameters): steady step, warm-up from
cold and from warm compile caches, memory, energy, graphs, ratio to eager, the step at which compiling has paid back,
total time for given numbers of steps, and a verdict. Needs neither torch nor a GPU. With ``--against FILE`` instead:
what moved since the rows of that file were written, which ``--update`` does (docs/comparing.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from trainer.report import tables
from trainer.report.comparison import AT_STEPS, Row, WorkloadComparison, compare
from trainer.report.runs import Run, find
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

what moved, with --against:
  ratio        eager's mean step over the arm's: differs by more than --tolerance, and the 95% intervals are apart
  warm-up      of cold starts: by more than --warmup-tolerance and a second, and the ranges of the runs are apart
  peak memory  of the device, by more than --tolerance
  counts       graphs, graph breaks, recompiles, cache misses: any difference
Rows are kept for each device, host processor and major version of torch, Triton and CUDA.

Exit codes: 0 compared (with --against: nothing got worse), 1 a row got worse or failed, 2 refused (wrong arguments, no
records, runs that are unlike, no reference for their machine).
"""
WIDTH = 100
"""Characters of a line where the output is not a terminal."""
SORTS: dict[str, Callable[[Row], float | None]] = {
    "given": lambda row: None,
    "step": lambda row: None if row.ratio is None else -row.ratio.value,
    "total": lambda row: row.total_seconds[max(row.total_seconds)] if row.total_seconds else None,
    "warm-up": lambda row: None if row.cold_warmup_seconds is None else row.cold_warmup_seconds.median,
    "memory": lambda row: row.peak_device_memory_gib,
    "pays-back": lambda row: row.break_even_steps,
}
"""Figure that each value of ``--sort`` goes by, the smallest first."""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(arguments)
    try:
        runs = find(options.runs, unreadable=lambda reason: print(f"left out: {reason}", file=sys.stderr))
        if options.against is not None:
            return drifted(runs, options)
        comparisons = compare(runs, baseline=options.baseline, at_steps=sorted(set(options.steps)))
        if not options.allow_unlike:
            refuse_unlike(comparisons)
        for found in comparisons:
            sort(found, SORTS[options.sort])
        texts = {"markdown": tables.markdown, "csv": tables.as_csv, "json": tables.as_json}
        targets = {kind: target for kind in texts if (target := getattr(options, kind)) is not None}
        for kind, target in targets.items():
            write(target, texts[kind](comparisons))
        if options.tensorboard is not None:
            write_for_tensorboard(comparisons, options.tensorboard)
        if "-" not in targets.values():
            console = Console(highlight=False)
            tables.show(comparisons, console if console.is_terminal else Console(width=WIDTH, highlight=False))
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
    add = parser.add_argument
    runs_help = "records, run folders, folders to search, or globs of these (default: outputs)"
    steps_help = "steps to give total times for; the verdict looks as far as the largest (default: 500 2000 20000)"
    add("runs", nargs="*", metavar="RUN", help=runs_help)
    add("--baseline", default="eager", metavar="ARM", help="arm to compare with (default: eager)")
    add("--steps", nargs="+", default=[str(steps) for steps in AT_STEPS], metavar="N", help=steps_help)
    add("--sort", choices=tuple(SORTS), default="given", help="order of the arms after the baseline (default: given)")
    for kind in ("markdown", "csv", "json"):
        add(f"--{kind}", metavar="FILE", help=f"also write {kind} there; - = to the output, alone")
    add("--tensorboard", metavar="DIR", help="also write tables and curves there, as a run of its own")
    add("--allow-unlike", action="store_true", help="compare runs of other devices, versions or precisions too")
    add = parser.add_argument_group("has a strategy become slower?").add_argument
    add("--against", type=Path, metavar="FILE", help="compare with the rows of this reference file (JSON)")
    add("--update", action="store_true", help="write the rows of these runs into that file instead")
    add("--tolerance", type=share, default=0.03, metavar="SHARE", help="of ratio and memory (default 0.03)")
    add("--warmup-tolerance", type=share, default=0.25, metavar="SHARE", help="of the warm-up (default 0.25)")
    add("--strict", action="store_true", help="exit with 1 too when a row got better, or could not be judged")
    options = parser.parse_args(arguments)
    # ``--steps 500 outputs`` is what people write; argparse takes the folder for a number of steps.
    options.runs = [*options.runs, *(word for word in options.steps if not word.isdecimal())] or ["outputs"]
    options.steps = [int(word) for word in options.steps if word.isdecimal()] or list(AT_STEPS)
    if [options.markdown, options.csv, options.json].count("-") > 1:
        parser.error("only one of --markdown, --csv and --json can be -")
    if (options.update or options.strict) and options.against is None:
        parser.error("--update and --strict need a file: --against FILE")
    return options


def share(text: str) -> float:
    """A share of 0 or more."""
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def drifted(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Compare with the rows of ``--against``, or write them; returns the exit code."""
    from trainer.report import drift

    try:
        if options.update:
            return drift.update(runs, options.against)
        tolerances = drift.Tolerances(ratio=options.tolerance, warmup=options.warmup_tolerance)
        return drift.against(runs, options.against, tolerances, strict=options.strict)
    except OSError as error:
        raise ValueError(f"{options.against}: {error.strerror}") from error


def refuse_unlike(comparisons: Sequence[WorkloadComparison]) -> None:
    """Raise ValueError when runs of a workload differ in what decides their speed, or no two are of one workload."""
    for found in comparisons:
        if found.unlike:
            raise ValueError(
                f"runs of {found.workload} are unlike: {'; '.join(found.unlike)}. Name the runs that belong together, "
                "or use --allow-unlike"
            )
    if len(comparisons) > 1 and all(
        len(found.rows) == 1 and found.task == comparisons[0].task for found in comparisons
    ):
        raise ValueError(
            "no two of these runs are of one workload, which makes nothing to compare: "
            f"{', '.join(found.workload for found in comparisons)}. Use --allow-unlike to see each by itself"
        )


def sort(found: WorkloadComparison, key: Callable[[Row], float | None]) -> None:
    """Put the rows in order of ``key``, the baseline first; what has no figure comes last, as it was given."""
    base = found.baseline_row
    found.rows.sort(key=lambda row: (row is not base, key(row) is None, key(row) or 0.0))


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


def write_for_tensorboard(comparisons: Sequence[WorkloadComparison], target: str) -> None:
    """Write what a sweep leaves in its ``summary``. Raises ValueError where that cannot be done."""
    from trainer.report import sweep

    try:
        missing = sweep.write(comparisons, Path(target))
    except OSError as error:
        raise ValueError(f"{target}: {error.strerror}") from error
    print(f"wrote {target}", file=sys.stderr)
    if missing is not None:
        print(missing, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
