"""Find the submodule, shape or option that a compile goes wrong with: ``python -m scripts.bisect compile=whole``.

Takes the trainer's overrides and tries what they compile piece by piece, each try in a process that may crash or hang:
the smallest submodule that fails, breaks the graph, compiles again and again, differs from eager or is slower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.streams import keep_streams

if TYPE_CHECKING:
    from scripts.bisect.report import Report
    from trainer.settings import Config

SYMPTOMS = ("fails", "breaks", "recompiles", "differs", "slower")
EXAMPLES = """\
examples:
  python -m scripts.bisect                                      # the default task, as compile=whole would run it
  python -m scripts.bisect task=captioning compile=regional
  python -m scripts.bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager --for breaks
  python -m scripts.bisect compile=whole --for slower --shapes 1 --json found.json

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments, 3 it takes several submodules together,
128 + signal interrupted.
"""


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    keep_streams()
    options = parse(arguments)
    from rich.console import Console

    from scripts.bisect.remote import WorkerFailed
    from scripts.bisect.report import REFUSED, print_report
    from scripts.bisect.trial import searched
    from scripts.training_arguments import check_file, check_folder, composed_training
    from trainer import errors
    from trainer.interrupt import Interrupted, StopRequest

    console = Console()
    try:
        with StopRequest(console.print):
            check_file("json", options.json)
            check_folder("output", options.output)
            config, overrides = composed_training(
                options.overrides, config_dir=options.config_dir, looks="bisect tries"
            )
            searched(config.compile.values())
            report = search(options, config, overrides)
            if options.json is not None:
                options.json.write_text(report.as_json(), encoding="utf-8")
    except errors.REFUSALS as error:
        errors.report(error)
        return REFUSED
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        errors.report_system(error)
        return REFUSED
    except Interrupted as interrupted:
        print(f"interrupted ({interrupted}): nothing was found yet", file=sys.stderr)
        return 128 + interrupted.signum
    print_report(report, console)
    return report.exit_code


def search(options: argparse.Namespace, config: Config, overrides: list[str]) -> Report:
    """Search, suggest, write the reproducer; progress goes to stderr."""
    from rich.console import Console

    from scripts.bisect.advice import reproduce, suggest
    from scripts.bisect.remote import RemoteBench
    from scripts.bisect.report import Report, trial_line
    from scripts.bisect.search import Investigation
    from strategies.compose import label

    report = Report(task=config.task.title, strategies=label(config.compile.values()), command=overrides)
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with (
        progress.status("building data and model") as status,
        RemoteBench(
            overrides,
            config_dir=options.config_dir,
            batches=options.batches,
            shapes=options.shapes,
            trial_seconds=options.trial_seconds,
            isolate=options.isolate,
        ) as bench,
    ):
        investigation = Investigation(
            bench,
            report,
            begins=lambda what: status.update(f"{what} ({report.trials} trials)"),
            ended=lambda number, what, outcome: progress.print(trial_line(number, what, outcome)),
        )
        investigation.run(SYMPTOMS if options.symptom is None else (options.symptom,))
        if report.symptom is not None:
            suggest(report, bench.site, config, overrides, config_dir=options.config_dir)
            if not options.no_reproducer:
                status.update("writing and running a reproducer")
                reproduce(report, bench, batch=investigation.showing_batch, folder=options.output)
    return report


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bisect",
        description=(__doc__ or "").splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for python -m trainer")
    parser.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for python -m trainer")
    parser.add_argument(
        "--for",
        dest="symptom",
        choices=SYMPTOMS,
        help="what to look for (default: the first of these that everything compiled shows)",
    )
    parser.add_argument(
        "--batches", type=positive, default=32, metavar="N", help="batches to look at for shapes (default %(default)s)"
    )
    parser.add_argument(
        "--shapes", type=positive, default=4, metavar="N", help="different shapes of batch to try (default %(default)s)"
    )
    parser.add_argument(
        "--trial-seconds",
        type=seconds,
        default=600.0,
        metavar="S",
        help="a trial that takes longer hangs (default %(default)g)",
    )
    parser.add_argument("--isolate", action="store_true", help="a fresh process for each trial, not only after a crash")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where the reproducer goes (default outputs/bisect/<task>-<module>)"
    )
    parser.add_argument("--no-reproducer", action="store_true", help="write none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    return parser.parse_intermixed_args(arguments)


def positive(text: str) -> int:
    """A number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A length of time."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
