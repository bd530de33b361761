"""Find the submodule, shape or option that a compile goes wrong with: ``crucible bisect compile=whole``.

Takes the trainer's overrides and tries what they compile piece by piece, each try in a process that may crash or hang:
the smallest submodule that fails, breaks the graph, compiles again and again, differs from eager or is slower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from scripts.arguments import check_file, check_folder, composed_training, exit_code, parser, positive, seconds
from scripts.bisect.report import SYMPTOMS, Report, print_report, trial_line
from scripts.bisect.search import Investigation, searched
from scripts.bisect.worker import RemoteBench
from strategies.compose import label
from trainer.process import keep_streams, leaving

EXAMPLES = """\
examples:
  crucible bisect                                      # the default task, as compile=whole would run it
  crucible bisect task=captioning compile=regional
  crucible bisect experiment=gpt2_smoke compile=whole compile.whole.backend=aot_eager --for breaks
  crucible bisect compile=whole --for slower --shapes 1 --json found.json

Exit codes: 0 nothing wrong, 1 found what is at fault, 2 wrong arguments, 3 it takes several submodules together,
128 + signal interrupted.
"""


def main(arguments: list[str] | None = None) -> int:
    keep_streams()
    options = parse(arguments)
    return exit_code(lambda _: bisect(options), interrupted="nothing was found yet")


def bisect(options: argparse.Namespace) -> int:
    """Search, suggest, write the reproducer, print; progress goes to stderr."""
    check_file("json", options.json)
    check_folder("output", options.output)
    given = options.overrides
    config, overrides = composed_training(given, config_dir=options.config_dir, looks="bisect tries")
    searched(config.compile.values())
    from scripts.bisect.advice import reproduce, suggest  # with Hydra, which --help does not need

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
    if options.json is not None:
        options.json.write_text(report.as_json(), encoding="utf-8")
    print_report(report, Console())
    return report.exit_code


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("bisect", __doc__ or "", EXAMPLES, overrides=True)
    add = made.add_argument
    symptom_help = "what to look for (default: the first of these that everything compiled shows)"
    add("--for", dest="symptom", choices=SYMPTOMS, help=symptom_help)
    batches_help = "batches to look at for shapes (default: %(default)s)"
    add("--batches", type=positive, default=32, metavar="N", help=batches_help)
    shapes_help = "different shapes of batch to try (default: %(default)s)"
    add("--shapes", type=positive, default=4, metavar="N", help=shapes_help)
    trial_help = "a trial that takes longer counts as hanging (default: %(default)g)"
    add("--trial-seconds", type=seconds, default=600.0, metavar="SECONDS", help=trial_help)
    isolate_help = "a fresh process for each trial (default: only after a crash)"
    add("--isolate", action="store_true", help=isolate_help)
    output_help = "folder of the reproducer (default: outputs/bisect/<task>-<module>)"
    add("--output", type=Path, metavar="DIR", help=output_help)
    add("--no-reproducer", action="store_true", help="write no reproducer (default: written, and run)")
    add("--json", type=Path, metavar="FILE", help="write everything there, for programs (default: nowhere)")
    return made.parse_intermixed_args(arguments)


if __name__ == "__main__":
    with leaving():
        sys.exit(main())
