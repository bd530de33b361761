"""Runs as a page to look at: ``python -m scripts.report RUNS -o report.html``

One self-contained HTML file: verdicts, curves of total time that cross where compiling has paid for itself, bars, step
times, graph breaks and recompiles, conditions and commands. Reads records only; torch is not imported.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from trainer.report import page, pictures
from trainer.report.comparison import AT_STEPS, compare
from trainer.report.runs import find
from trainer.telemetry.files import written_whole

EXAMPLES = """\
examples:
  python -m scripts.report outputs/sweeps/2026-11-21_12-00-00
  python -m scripts.report outputs -o report.html --steps 1000 100000
  python -m scripts.report outputs/captioning 'outputs/gpt2/*/*' --baseline regional --pictures docs/pictures

RUNS are record files, run folders, folders that hold such folders at any depth, or globs of these.
Exit codes: 0 written, 2 wrong arguments or no runs.
"""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return report(options)
    except OSError as error:
        print(f"error: {error.filename or options.output}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    return 2


def report(options: argparse.Namespace) -> int:
    """Write the page, and the pictures if asked for."""
    unreadable: list[str] = []
    runs = find(options.runs, unreadable=unreadable.append)
    for reason in unreadable:
        print(f"warning: left out: {reason}", file=sys.stderr)
    comparisons = compare(runs, baseline=options.baseline, at_steps=options.steps)
    text = page.render(comparisons, title=options.title, command=options.command)
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
    beside.add_argument("--pictures", type=Path, metavar="DIR", help="write the pictures there too, as PNG")
    parser = argparse.ArgumentParser(
        parents=[beside],
        prog="python -m scripts.report",
        description=(__doc__ or "").partition("\n\n")[2].strip(),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="*", default=["outputs"], metavar="RUNS", help="default: outputs")
    add("-o", "--output", default="report.html", metavar="FILE", help="default: report.html; - for stdout")
    add("--baseline", default="eager", metavar="ARM", help="what the others are compared with, default: eager")
    add("--steps", type=int, nargs="+", default=list(AT_STEPS), metavar="N", help="give total time at N steps")
    add("--title", default="What compiling costs, and what it gives", help="heading of the page")
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "-m", "scripts.report", *beside.parse_known_args(arguments)[1]])
    return options


if __name__ == "__main__":
    # A reader that stops early (| head) is not an error.
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
