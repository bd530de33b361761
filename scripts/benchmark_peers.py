"""Ours beside what people do without it, in rounds, each run in a fresh process with empty compile caches:

    crucible benchmark_peers --out DIR --rounds 2 --ours eager '[regional,cuda_graph]' whole -- experiment=gpt2

An arm of ours is a value of ``compile=``, with further overrides after a blank. Peers are a hand-written loop, eager
and with torch.compile, plain Lightning over a compiled module, and accelerate's regional compilation. All train the
same module on the same batches under the same telemetry, and alternate (A B C, A B C). Each leaves a record below
DIR, for ``scripts.compare`` and ``scripts.report``; the same command called again runs what is missing.

Exit codes: 0 all runs finished, 1 some did not, 2 refused before any work, 128 + signal stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts import compare
from scripts.arguments import parser, positive, seconds
from scripts.matrix import ALWAYS
from scripts.peers.cell import BACKENDS, OVERRIDE, PEERS, REFUSED, flags, mark, refuse, refuse_workload
from trainer import errors
from trainer.config import compose
from trainer.process import keep_streams
from trainer.sweep.environment import CACHES_DIRECTORY, described
from trainer.sweep.ledger import Ledger, alone
from trainer.sweep.plan import PlannedCell, SweepOptions, directory_name, name_by_difference, quoted, with_arms
from trainer.sweep.processes import Signals, goes_on, run_queues, set_aside
from trainer.sweep.sweep import Sweep, SweepView
from trainer.telemetry.record import RunRecord

RESERVED = ("compile", "repeat", "resume", "run", OVERRIDE.rstrip("="))
"""Names of overrides that are the arms' or this command's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then compare all; returns the exit code."""
    keep_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    options, signals = parse(given), Signals()
    try:
        with signals.watch():
            drafts = [*ours(options), *peers(options)]
            with alone(options.out):
                ledger = opened(options.out, given)
                failed = run(in_rounds(drafts, options.rounds), ledger, signals, timeout_seconds=options.timeout)
    except errors.REFUSALS as error:
        errors.report(error)
        return REFUSED
    except OSError as error:
        errors.report_system(error, place=options.out)
        return REFUSED
    if signals.received is not None:
        print(f"stopped; continue with: {ledger.go_on_with()}")
        return 128 + signals.received
    if failed:
        print(f"run what failed again with: {ledger.go_on_with()}")
    return compare.main([str(options.out)]) or int(failed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what is not a flag is an override of every run."""
    made = parser("benchmark_peers", __doc__ or "")
    add = made.add_argument
    ours_help = "values of compile=, with overrides after a blank (default: eager)"
    add("--ours", nargs="+", default=["eager"], metavar="ARM", help=ours_help)
    add("--peers", nargs="+", default=list(PEERS), metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    add("--rounds", type=positive, default=1, metavar="N", help="rounds of all arms (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs (no default)")
    timeout_help = "longest time of one run; then it has failed (default: no limit)"
    add("--timeout", type=seconds, metavar="SECONDS", help=timeout_help)
    backend_help = "of the peers' torch.compile (default: %(default)s)"
    add("--backend", choices=BACKENDS, default=BACKENDS[0], help=backend_help)
    add("--config-dir", metavar="DIR", help="your own options and plugin.py, as for crucible train")
    options, overrides = made.parse_known_args(arguments)
    words = [word for word in overrides if word != "--"]
    if flags := [word for word in words if word.startswith("-")]:
        made.error(f"unknown option {flags[0]}")
    # After a list of arms an override is taken for one of them; unlike an arm it has a name of its own before the "=".
    for arms in (options.ours, options.peers):
        words += [arm for arm in arms if re.match(r"^[+~\w./]+=", arm)]
        arms[:] = dict.fromkeys(arm for arm in arms if arm not in words)
    options.overrides = list(dict.fromkeys(words))
    for word in options.overrides:
        name = word.lstrip("+~").partition("=")[0]
        if "=" not in word:
            made.error(f"{word!r} is not an override (name=value)")
        if name.partition(".")[0] in RESERVED:
            made.error(f"{word}: arms are named by --ours and --peers, and all of them train from a cold start")
    return options


def ours(options: argparse.Namespace) -> Iterator[PlannedCell]:
    """A cell for each arm of ours. Raises ValueError, or Hydra's errors."""
    for overrides, arm in with_arms([*ALWAYS, *options.overrides, "repeat=cold"], options.ours):
        command = [*flags(options.config_dir), *overrides]
        record = described(compose(overrides, config_dir=options.config_dir), command)
        yield planned(record, overrides, arm, ["-m", "trainer", *command, "hydra.mode=RUN"])


def peers(options: argparse.Namespace) -> Iterator[PlannedCell]:
    """The same for each peer."""
    shared = (*ALWAYS, *options.overrides, "repeat=cold")
    config = compose(shared, config_dir=options.config_dir)
    refuse(options.peers, config)
    refuse_workload(config)
    several = config.trainer.devices not in (None, 1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.trainer.devices}"]
    for name in options.peers:
        overrides = (*shared, OVERRIDE + name)
        command = [*flags(options.config_dir, options.backend), *overrides]
        record = described(config, command)
        mark(record, name, backend=options.backend)
        yield planned(
            record, overrides, overrides[-1:], [*(torchrun if several else ()), "-m", "scripts.peers.cell", *command]
        )


def planned(record: RunRecord, overrides: tuple[str, ...], arm: tuple[str, ...], command: list[str]) -> PlannedCell:
    """A cell without round and directory."""
    command = [sys.executable, *command]
    return PlannedCell(overrides=overrides, arm=arm, job=0, start="cold", described=record, command=command)


def in_rounds(drafts: Sequence[PlannedCell], rounds: int) -> list[PlannedCell]:
    """Every draft once a round, each a cell of its own. A first round has its number, so that a second may follow."""
    cells = [
        dataclasses.replace(draft, round=number, described=dataclasses.replace(draft.described, round=number))
        for number in range(1, rounds + 1)
        for draft in drafts
    ]
    name_by_difference(cells)
    return cells


def opened(out: Path, arguments: list[str]) -> Ledger:
    """The ledger of a folder, a new one in a new folder. Raises ValueError for a folder of something else."""
    ledger = Ledger.load(out) or Ledger(directory=out)
    if ledger.arguments and not ledger.of_peers:
        raise ValueError(f"--out={out}: holds a sweep of python -m trainer; take another folder")
    ledger.arguments, ledger.working_directory, ledger.state = arguments, str(Path.cwd()), "running"
    return ledger


def run(cells: Sequence[PlannedCell], ledger: Ledger, signals: Signals, *, timeout_seconds: float | None) -> bool:
    """Run the cells that have not finished, one after the other; returns whether some failed."""
    for cell in cells:
        place(cell, ledger)
    ledger.save()
    view = SweepView(cells)
    sweep = Sweep(cells, ledger, SweepOptions(timeout_seconds=timeout_seconds), view)
    for cell in cells:
        if not sweep.is_done(cell) and goes_on(cell):
            set_aside(cell.directory)  # a measurement of two halves is none
    try:
        run_queues([cells], sweep, signals, places=[{}])
    finally:
        sweep.close(stopped=signals.received is not None)
    return any(result.exit_code != 0 for result in sweep.results)


def place(cell: PlannedCell, ledger: Ledger) -> None:
    """Give a cell its number, directory and caches: those of an earlier call, where it was planned before."""
    cell.number = ledger.next_number()
    cell.directory = ledger.directory / f"{cell.number}-{directory_name(cell.chosen)}"
    ledger.enter(cell)
    cell.caches = ledger.directory / CACHES_DIRECTORY / cell.directory.name
    folder = cell.directory.resolve()
    where = ["--out", str(folder)] if cell.arm[0].startswith(OVERRIDE) else [f"hydra.run.dir={quoted(folder)}"]
    cell.command = [*cell.command, *where]


if __name__ == "__main__":
    sys.exit(main())
