"""Strategies side by side on one workload, each in fresh processes with caches of its own, for docs/results:

    python -m scripts.benchmark_strategies --arms eager whole '[regional,cuda_graph]' \
        'whole compile.whole.mode=reduce-overhead' --warm --out DIR experiment=captioning_base task.data.pad_to=64

An arm is a value of ``compile=``, with further overrides after a blank. This is a sweep (docs/sweeps.md) with the
options that such a measurement needs, and then ``python -m scripts.compare DIR``; called again, it goes on with the
sweep. Arguments that are no flag are overrides of every cell.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import compare
from trainer.sweep.plan import quoted

ALWAYS = (
    "trainer.val_every_n_steps=0",
    "trainer.checkpoint_every_n_steps=null",  # gigabytes a cell, and nobody goes on from one
    "trainer.progress=none",
    "trainer.log_every_n_steps=100",  # windows of at least two seconds, which the energy counter needs
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then compare; returns the exit code of the sweep, or else of the comparison."""
    options = parse(arguments)
    swept = subprocess.run([sys.executable, "-m", "trainer", *sweep_arguments(options)], check=False).returncode
    if swept not in (0, 1):  # refused or stopped: nothing new to compare
        return swept
    return swept or compare.main([str(options.out)])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is no flag is an override."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", required=True, metavar="ARM", help="values of compile=, overrides after")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each arm (default 1)")
    parser.add_argument("--warm", action="store_true", help="a second process after each cold one, on its caches")
    parser.add_argument("--out", type=Path, required=True, help="directory of the sweep")
    parser.add_argument("--timeout", type=int, default=300, help="seconds after which a cell is given up (default 300)")
    options, overrides = parser.parse_known_args(arguments)
    overrides = [given for given in overrides if given != "--"]
    # An override among the arms has a key of its own and is no arm: "task.data.pad_to=64".
    options.overrides = [*overrides, *(arm for arm in options.arms if re.match(r"^[+~\w./]+=", arm))]
    options.arms = [arm for arm in options.arms if arm not in options.overrides]
    return options


def sweep_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of the sweep that does this."""
    return [
        "-m",
        f"sweep={options.out}",
        *ALWAYS,
        *options.overrides,
        f"repeat={'cold,warm' if options.warm else 'cold'}",
        f"hydra.launcher.arms=[{','.join(map(quoted, options.arms))}]",
        f"hydra.launcher.rounds={options.rounds}",
        f"hydra.launcher.timeout_seconds={options.timeout}",
    ]


if __name__ == "__main__":
    sys.exit(main())
