"""Every workload under every strategy that it can run, for docs/results: ``crucible matrix --rounds 3``

Each row is a workload and the arms that are compared on it, a sweep of its own (docs/sweeps.md) in a folder of its own
below ``--out``. Called again it continues with what is missing. At the end come the table of ``scripts.compare`` and
the page of ``scripts.report`` over all of them.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import compare, report
from scripts.arguments import parser, positive
from trainer.process import keep_streams
from trainer.sweep.plan import quoted

EXAMPLES = """\
examples:
  crucible matrix --list                               # the rows, with their arms
  crucible matrix --rounds 3 --warm                    # everything, cold and warm, three rounds: hours
  crucible matrix gpt2 resnet50 --out outputs/two      # two rows
  crucible matrix --smoke --out outputs/try            # in small: does it run here?

Exit codes: 0 all ran, 1 some cells failed, 2 wrong arguments, 128 + signal interrupted.
"""
STATIC = ("eager", "cuda_graph", "optimizer", "regional", "[regional,cuda_graph]", "whole", "[whole,cuda_graph]")
RAGGED = (
    *("eager", "regional", "[regional,dynamic]", "[whole,dynamic]", "buckets", "[regional,buckets]"),
    *("[regional,buckets,cuda_graph]", "full_stack"),
)
BY_TOKENS = " compile.buckets.tokens_per_batch=16384"
AUTO = tuple(f"auto compile.auto.remember=false compile.auto.planned_steps={steps}" for steps in (500, 2_000, 20_000))
"""What it chooses for runs of these lengths; a run is stopped early, and its total calculated."""
ALWAYS = (
    "trainer.val_every_n_steps=0",
    "trainer.checkpoint_every_n_steps=null",  # gigabytes a cell, and nobody continues from one
    "trainer.progress=none",
    "trainer.log_every_n_steps=100",  # windows of at least two seconds, which the energy counter needs
)
"""Overrides of every measurement."""
GRACE_SECONDS = 60.0
"""For the cell under way to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload, and what is compared on it."""

    name: str
    experiment: str
    steps: int
    """Optimizer steps of a run: enough for a steady median on the GPU that the workload is meant for."""
    arms: tuple[str, ...] = STATIC
    overrides: tuple[str, ...] = ()
    smoke: str = ""
    """The experiment in small, where it is not called ``<experiment>_smoke``."""
    warm: bool = False
    """Whether its warm starts are what it is there for."""

    def cells(self, *, smoke: bool) -> list[str]:
        """Overrides of every cell."""
        if smoke:
            return [f"experiment={self.smoke or self.experiment + '_smoke'}"]
        return [f"experiment={self.experiment}", *self.overrides, f"trainer.max_steps={self.steps}"]


def captioning(name: str, steps: int, arms: tuple[str, ...], *overrides: str, warm: bool = False) -> Row:
    """A row on the captioning network."""
    experiment = "captioning_base"
    return Row(name=name, experiment=experiment, steps=steps, arms=arms, overrides=overrides, smoke="smoke", warm=warm)


PADDED, LOGNORMAL = "task.data.pad_to=64", "task/data=lognormal"
ROWS = (
    captioning(
        "captioning",
        150,
        (*STATIC, "[regional,optimizer,cuda_graph]", "whole compile.whole.mode=reduce-overhead", *AUTO),
        PADDED,
    ),
    captioning(
        "captioning_start",
        40,
        ("eager", "[regional,cached]", "[whole,cached]", "[regional,cached,cuda_graph]"),
        PADDED,
        warm=True,
    ),
    captioning("captioning_ragged", 150, RAGGED, LOGNORMAL),
    captioning(
        "captioning_by_tokens",
        60,
        ("eager", *(f"{arm}{BY_TOKENS}" for arm in RAGGED if "buckets" in arm or arm == "full_stack")),
        LOGNORMAL,
        "task.data.batch_size=256",
    ),
    Row(name="gpt2", experiment="gpt2", steps=110, arms=(*STATIC, *AUTO)),
    Row(name="resnet50", experiment="resnet50", steps=150, arms=(*STATIC, *AUTO)),
    Row(name="vit_l_16", experiment="vit_l_16", steps=110),
    Row(name="alexnet", experiment="alexnet", steps=300),
    Row(name="bert_base", experiment="bert_base", steps=150),
    Row(name="bert_base_ragged", experiment="bert_base_ragged", steps=150, arms=RAGGED),
    Row(name="micro_convnet", experiment="micro_convnet", steps=800, arms=(*STATIC, *AUTO)),
    Row(name="micro_transformer_block", experiment="micro_transformer_block", steps=800),
)


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    keep_streams()
    options = parse(arguments)
    if options.list:
        for row in ROWS:
            print(f"{row.name:24} {' '.join(row.cells(smoke=False))}\n{'':24} {', '.join(row.arms)}")
        return 0
    rows, failed = [row for row in ROWS if not options.rows or row.name in options.rows], False
    for number, row in enumerate(rows, start=1):
        print(f"row {number} of {len(rows)}: {row.name}", flush=True)
        exit_code = sweep(row, options)
        if exit_code not in (0, 1):
            return exit_code
        failed = failed or exit_code == 1
    folders = [str(options.out / row.name) for row in rows]
    compare.main(folders)
    report.main([*folders, "-o", str(options.out / "report.html")])
    return int(failed)


def sweep(row: Row, options: argparse.Namespace) -> int:
    """Run what is missing of ``row``; returns the sweep's exit code."""
    child = subprocess.Popen([sys.executable, "-m", "trainer", *sweep_arguments(row, options)])
    try:
        return child.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the sweep as well
        child.wait(GRACE_SECONDS)
        print("stopped; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        child.kill()


def sweep_arguments(row: Row, options: argparse.Namespace) -> list[str]:
    """Arguments of ``python -m trainer`` for the sweep of ``row``."""
    return [
        "-m",
        f"sweep={options.out / row.name}",
        *ALWAYS,
        *row.cells(smoke=options.smoke),
        f"repeat={'cold,warm' if options.warm or row.warm else 'cold'}",
        f"hydra.launcher.arms=[{','.join(map(quoted, row.arms))}]",
        f"hydra.launcher.rounds={options.rounds}",
        f"hydra.launcher.timeout_seconds={options.timeout}",
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    made = parser("matrix", __doc__ or "", EXAMPLES)
    add, names = made.add_argument, [row.name for row in ROWS]
    add("rows", nargs="*", metavar="ROW", help=f"of {', '.join(names)} (default: all)")
    add("--list", action="store_true", help="show the rows and their arms, run nothing (default: run)")
    out_help = "folder of the sweeps and the page (default: %(default)s)"
    add("--out", type=Path, default=Path("outputs/matrix"), metavar="DIR", help=out_help)
    rounds_help = "rounds of all arms, for the spread (default: %(default)s)"
    add("--rounds", type=positive, default=1, metavar="N", help=rounds_help)
    add("--warm", action="store_true", help="warm starts of every row (default: of captioning_start alone)")
    timeout_help = "longest time of a cell; then it has failed (default: %(default)s)"
    add("--timeout", type=positive, default=300, metavar="SECONDS", help=timeout_help)
    add("--smoke", action="store_true", help="the experiments in small; what needs CUDA fails without (default: whole)")
    options = made.parse_args(arguments)
    for name in options.rows:
        if name not in names:
            made.error(f"{quoted(name)} is not a row; there are {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
