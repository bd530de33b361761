"""Say where the compiler breaks, repeats or leaves out a training step: ``crucible explain compile=whole``.

Takes the trainer's overrides, runs an epoch's shapes through forward, backward and optimizer step, and names each graph
break and recompile with its line of code and the usual fix. Nothing is trained for keeps, nothing written unasked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from scripts.arguments import (
    check_file,
    check_folder,
    composed_training,
    exit_code,
    parser,
    positive,
    seconds,
)

if TYPE_CHECKING:
    from scripts.explain.explanation import Explanation
    from trainer.settings import Config

EXAMPLES = """\
examples:
  crucible explain                                     # the default task, as compile=whole would run it
  crucible explain task=captioning compile=regional
  crucible explain experiment=gpt2_smoke compile=whole --json why.json --html why.html
  crucible explain compile=whole --backend inductor --code generated   # kernels and fusions, generated code
  crucible explain compile=whole --batches 20          # the first batches alone

Breaks and recompiles need no Inductor: off a GPU the default backend is aot_eager, on one the strategies' own.
Exit codes: 0 nothing wrong, 1 graph breaks, recompiles or failures found, 2 wrong arguments, 128 + signal interrupted.
"""
BACKENDS = ("configured", "inductor", "aot_eager", "eager")
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(lambda stop: explained(options, stop.install), interrupted="nothing was written")


def explained(options: argparse.Namespace, before_steps: Callable[[], None]) -> int:
    for name in ("json", "html"):
        check_file(name, getattr(options, name))
    check_folder("code", options.code)
    config = composed(options.overrides, config_dir=options.config_dir)
    with private_caches():
        explanation = run_steps(options, config, before_steps)
        write(explanation, options)
    from scripts.explain.report import print_explanation

    print_explanation(explanation, Console(highlight=False, soft_wrap=True))
    return 1 if explanation.problems else 0


def composed(overrides: list[str], *, config_dir: str | None) -> Config:
    """The configuration of the overrides, with ``compile=whole`` where they name no strategy. Raises ValueError."""
    config, _ = composed_training(overrides, config_dir=config_dir, looks="explain looks at")
    if not config.compile:
        raise ValueError("compile=eager: compiles nothing, there is nothing to explain; try compile=whole")
    return config


def run_steps(options: argparse.Namespace, config: Config, before_steps: Callable[[], None]) -> Explanation:
    """Run the steps and explain them."""
    from trainer.process import importing

    with importing():
        import torch

        from scripts.explain.recorder import Options
        from scripts.explain.run import explain

    with Console(stderr=True, highlight=False).status("getting ready") as status:
        chosen = Options(
            backend=options.backend or ("configured" if torch.cuda.is_available() else "aot_eager"),
            batches=options.batches,
            seconds=options.seconds,
            profiles=not options.no_profile,
            progress=status.update,
            before_steps=before_steps,
        )
        return explain(config, chosen, command=options.overrides)


def write(explanation: Explanation, options: argparse.Namespace) -> None:
    """Write what was asked for and note it in the explanation."""
    if options.code is not None:
        from scripts.explain.compiler import generated_files, name_of

        ours = os.environ["TORCHINDUCTOR_CACHE_DIR"]  # not what this process compiled before
        files = [file for file in generated_files() if file.is_relative_to(ours)]
        if files:
            options.code.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copyfile(file, options.code / name_of(file))
            explanation.files["generated code"] = str(options.code)
        else:
            explanation.notes.append(f"--code: {explanation.backend} generates no code; --backend inductor does")
    if options.html is not None:
        explanation.files["page"] = str(options.html)
    if options.json is not None:
        explanation.files["JSON"] = str(options.json)
        options.json.write_text(explanation.as_json(), encoding="utf-8")
    if options.html is not None:
        from scripts.explain.report import page

        options.html.write_text(page(explanation, options.html.resolve().parent), encoding="utf-8")


@contextlib.contextmanager
def private_caches() -> Iterator[None]:
    """Compiler caches of our own, gone afterwards: what comes from a cache was neither compiled nor counted.

    Torch reads these variables when it is imported.
    """
    from strategies.toolchain import environment

    with tempfile.TemporaryDirectory(prefix="explain-caches-", ignore_cleanup_errors=True) as folder:
        given: dict[str, str] = {name: str(Path(folder, place)) for name, place in CACHES.items()}
        given["KINETO_LOG_LEVEL"] = "99"  # the profiler's library, on devices that are not there
        with environment(given):
            yield


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("explain", __doc__ or "", EXAMPLES, overrides=True)
    add = made.add_argument
    add("--backend", choices=BACKENDS, help="compiler; configured = each strategy's own (default: see below)")
    add("--batches", type=positive, metavar="N", help="batches of the epoch to look at (default: all)")
    seconds_help = "longest time for batches after the first four (default: %(default)g)"
    add("--seconds", type=seconds, default=120.0, metavar="SECONDS", help=seconds_help)
    add("--no-profile", action="store_true", help="leave out which part of the step is compiled (default: profiled)")
    add("--json", type=Path, metavar="FILE", help="write everything there, for programs (default: nowhere)")
    add("--html", type=Path, metavar="FILE", help="write a page there that needs no network (default: nowhere)")
    add("--code", type=Path, metavar="DIR", help="copy the code that Inductor generated there (default: nowhere)")
    return made.parse_intermixed_args(arguments)


if __name__ == "__main__":
    from trainer.process import leaving

    with leaving():
        sys.exit(main())
