"""Say where the compiler breaks, repeats or leaves out a training step: ``crucible explain compile=whole``.

Takes the trainer's overrides, runs an epoch's shapes through forward, backward and optimizer step, and names each graph
break and recompile with its line of code and the usual fix. Nothing is trained for keeps, nothing written unasked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from scripts.arguments import check_file, composed_training, exit_code, parser, positive, seconds
from trainer.process import importing, leaving
from trainer.sweep.environment import cache_variables

if TYPE_CHECKING:
    from trainer.settings import Config

EXAMPLES = """\
examples:
  crucible explain                                     # the default task, as compile=whole would run it
  crucible explain task=captioning compile=regional
  crucible explain experiment=gpt2_smoke compile=whole --json why.json
  crucible explain compile=whole --backend inductor    # also what Inductor itself fails at
  crucible explain compile=whole --batches 20          # the first batches alone

Breaks and recompiles need no Inductor: off a GPU the default backend is aot_eager, on one the strategies' own.
Exit codes: 0 nothing wrong, 1 graph breaks, recompiles or failures found, 2 wrong arguments, 128 + signal interrupted.
"""
BACKENDS = ("configured", "inductor", "aot_eager", "eager")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(lambda stop: explained(options, stop.install), interrupted="nothing was written")


def explained(options: argparse.Namespace, before_steps: Callable[[], None]) -> int:
    """Run the steps, print and write what they show."""
    check_file("json", options.json)
    config = composed(options.overrides, config_dir=options.config_dir)
    from strategies.toolchain import environment

    with tempfile.TemporaryDirectory(prefix="explain-caches-", ignore_cleanup_errors=True) as folder:
        # Of our own, gone afterwards: what comes from a cache is not compiled. Torch reads them when it is imported.
        variables = cache_variables(Path(folder), store=False)
        variables["KINETO_LOG_LEVEL"] = "99"  # the profiler's library, on devices that are not there
        with environment(variables), Console(stderr=True, highlight=False).status("getting ready") as status:
            with importing():
                import torch

                from scripts.explain.explanation import print_explanation
                from scripts.explain.recorder import Options
                from scripts.explain.run import explain
            chosen = Options(
                backend=options.backend or ("configured" if torch.cuda.is_available() else "aot_eager"),
                batches=options.batches,
                seconds=options.seconds,
                profiles=not options.no_profile,
                progress=status.update,
                before_steps=before_steps,
            )
            explanation = explain(config, chosen, command=options.overrides)
    if options.json is not None:
        options.json.write_text(explanation.as_json(), encoding="utf-8")
    print_explanation(explanation, Console(highlight=False, soft_wrap=True))
    return 1 if explanation.problems else 0


def composed(overrides: list[str], *, config_dir: str | None) -> Config:
    """The configuration of the overrides, with ``compile=whole`` where they name no strategy. Raises ValueError."""
    config, _ = composed_training(overrides, config_dir=config_dir, looks="explain looks at")
    if not config.compile:
        raise ValueError("compile=eager: compiles nothing, there is nothing to explain; try compile=whole")
    return config


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("explain", __doc__ or "", EXAMPLES, overrides=True)
    add = made.add_argument
    add("--backend", choices=BACKENDS, help="compiler; configured = each strategy's own (default: see below)")
    add("--batches", type=positive, metavar="N", help="batches of the epoch to look at (default: all)")
    seconds_help = "longest time for batches after the first four (default: %(default)g)"
    add("--seconds", type=seconds, default=120.0, metavar="SECONDS", help=seconds_help)
    add("--no-profile", action="store_true", help="leave out which part of the step is compiled (default: profiled)")
    add("--json", type=Path, metavar="FILE", help="write everything there, for programs (default: nowhere)")
    return made.parse_intermixed_args(arguments)


if __name__ == "__main__":
    with leaving():
        sys.exit(main())
