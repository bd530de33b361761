"""Ours beside what people do without it, in rounds, each run in a fresh process with empty compile caches:

    crucible benchmark_peers --out DIR --rounds 2 --ours eager '[regional,cuda_graph]' whole -- experiment=gpt2

An arm of ours is a value of ``compile=``, with further overrides after a blank. Peers are a hand-written loop, eager
and with torch.compile, plain Lightning over a compiled module, and accelerate's regional compilation. All train the
same module on the same batches under the same telemetry, and alternate (A B C, A B C). Each leaves a record below
DIR, for ``scripts.compare`` and ``scripts.report``; the same command called again runs what is missing.

    crucible benchmark_peers peer=loop_compile experiment=gpt2 [--out DIR]         # one peer, in this process

Exit codes: 0 all runs finished, 1 some did not, 2 refused before any work, 128 + signal stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from scripts import compare
from scripts.arguments import parser, positive, seconds
from scripts.matrix import ALWAYS
from trainer import errors
from trainer.config import compose
from trainer.process import importing, keep_streams
from trainer.report.runs import PEER
from trainer.settings import Config
from trainer.sweep.environment import CACHES_DIRECTORY, described, end_with_parent, starting_caches
from trainer.sweep.ledger import Ledger, alone
from trainer.sweep.plan import PlannedCell, SweepOptions, directory_name, name_by_difference, quoted, with_arms
from trainer.sweep.processes import Signals, goes_on, run_queues, set_aside
from trainer.sweep.sweep import Sweep, SweepView
from trainer.telemetry.record import RunRecord

REFUSED = 2
BACKENDS = ("inductor", "aot_eager", "eager")
OVERRIDE = f"{PEER}="
"""How a command names a peer: ``peer=loop_eager``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way to train that is not ours."""

    about: str
    """What runs, in a few words for its record."""
    library: str = "torch"
    """Package that it is the usual way of, whose version its record holds."""
    compiles: bool = True
    """Whether anything is compiled, without which it has failed."""
    not_under: dict[str, str] = field(default_factory=dict)
    """By value of ``trainer.strategy``: why it does not train so."""


PEERS = {
    "loop_eager": Peer(about="a hand-written loop, nothing compiled", compiles=False),
    "loop_compile": Peer(about="a hand-written loop, the network replaced by torch.compile(network)"),
    "lightning_compile": Peer(
        about="L.Trainer(...).fit(torch.compile(module)), which compiles the whole training_step; Lightning's own "
        "logger and progress bar",
        library="lightning",
        not_under={"fsdp2": "plain Lightning leaves the sharding to the module's configure_model"},
    ),
    "accelerate_regional": Peer(
        about="Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True)) and its loop",
        library="accelerate",
    ),
}

REQUIRED: dict[str, tuple[object, ...]] = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "num_nodes": (None, 1),
    "precision": ("auto", "32-true", "bf16-mixed"),
    "accumulate_grad_batches": (1,),
    "deterministic": (False,),
    "val_every_n_steps": (0,),
}
"""Values of ``trainer.<name>`` under which all peers do the same work as we."""
TOGETHER = ("auto", "ddp", "fsdp2")
"""Values of ``trainer.strategy`` with several devices; ``auto`` is DDP."""
RESERVED = ("compile", "repeat", "resume", "run", OVERRIDE.rstrip("="))
"""Names of overrides that are the arms' or this command's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then compare all; returns the exit code."""
    keep_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if any(word.startswith(OVERRIDE) for word in given):
        return one(given)
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
            record,
            overrides,
            overrides[-1:],
            [*(torchrun if several else ()), "-m", "scripts.benchmark_peers", *command],
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


# ---- one peer in this process ----------------------------------------------------------------------------------------


def one(given: Sequence[str]) -> int:
    """Train one peer here; returns 0 finished, 1 failed, 2 refused before any work, 128 + signal interrupted."""
    end_with_parent()
    options = parse_one(given)
    try:
        config = compose(options.overrides, config_dir=options.config_dir)
        if config.compile:
            raise ValueError(f"compile={'+'.join(config.compile)}: a peer takes no strategies of ours; leave it out")
        refuse([options.peer], config)
        refuse_workload(config)
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != (config.trainer.devices or 1):
            raise ValueError(
                f"trainer.devices={config.trainer.devices or 1}: {started} processes were started; several take "
                "python -m torch.distributed.run --standalone --nproc-per-node=N -m scripts.benchmark_peers"
            )
        with starting_caches(config.repeat, options.out):
            with importing():  # only now, as it reads where its caches are
                from scripts.peers import run as train_peer

            record = train_peer(
                options.peer, config, run_dir=options.out, command=options.command, backend=options.backend
            )
    except errors.REFUSALS as error:
        errors.report(error)
        return REFUSED
    except OSError as error:
        errors.report_system(error, place=options.out)
        return REFUSED
    speed = record.steady_steps_per_second
    if os.environ.get("RANK", "0") != "0":
        return record.exit_code
    parts = [record.label, record.status, f"{speed:.2f} steps/s" if speed else None, record.reason, str(options.out)]
    print(" · ".join(part for part in parts if part))
    return record.exit_code


def parse_one(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options; ``command`` is all of them but where the run lies."""
    parser = argparse.ArgumentParser(prog="crucible benchmark_peers", description="Train one peer.")
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help=f"{OVERRIDE}NAME and the trainer's overrides")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: outputs/peers/<time>)")
    parser.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for python -m trainer")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default inductor)")
    options = parser.parse_intermixed_args(arguments)
    named = [word for word in options.overrides if word.startswith(OVERRIDE)]
    if len(named) != 1:
        parser.error(f"name one peer: {', '.join(OVERRIDE + name for name in PEERS)}")
    options.command = [*flags(options.config_dir, options.backend), *options.overrides]
    options.peer = named[0].removeprefix(OVERRIDE)
    options.overrides = [word for word in options.overrides if word != named[0]]
    options.out = options.out or Path("outputs", "peers", f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}")
    return options


def flags(config_dir: str | None, backend: str = BACKENDS[0]) -> list[str]:
    """What of the command is not an override, as a process in any directory takes it; defaults are left out."""
    where = [] if config_dir is None else ["--config-dir", str(Path(config_dir).resolve())]
    return where if backend == BACKENDS[0] else [*where, "--backend", backend]


def refuse(names: Sequence[str], config: Config) -> None:
    """Raise ValueError for peers that do not exist, whose library is not installed, or that do not train as
    ``trainer.strategy`` says."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"{OVERRIDE}{unknown[0]} is not one of {tuple(PEERS)}")
    for name in names:
        if (reason := PEERS[name].not_under.get(config.trainer.strategy)) is not None:
            others = " ".join(other for other in PEERS if config.trainer.strategy not in PEERS[other].not_under)
            raise ValueError(
                f"trainer.strategy={config.trainer.strategy}: {OVERRIDE}{name}: {reason}; take --peers {others}"
            )
        library = PEERS[name].library
        if util.find_spec(library) is None:
            others = " ".join(other for other in PEERS if PEERS[other].library != library)
            raise ValueError(
                f"{OVERRIDE}{name} needs {library}: pip install -e '.[peers]', or leave it out with --peers {others}"
            )


def refuse_workload(config: Config) -> None:
    """Raise ValueError, a line for each complaint, for what the peers' loops cannot do as ours does it."""
    complaints = [
        f"trainer.{name}={getattr(config.trainer, name)!r} must be "
        f"{f'one of {allowed}' if len(allowed) > 1 else allowed[0]}: peers know nothing else"
        for name, allowed in REQUIRED.items()
        if getattr(config.trainer, name, allowed[0]) not in allowed
    ]
    devices, strategy = config.trainer.devices or 1, config.trainer.strategy
    if not isinstance(devices, int) or devices < 1:
        complaints.append(f"trainer.devices={devices} must be a number of devices")
    elif strategy not in (TOGETHER if devices > 1 else ("auto",)):
        allowed = " or ".join(TOGETHER if devices > 1 else ("auto",))
        complaints.append(f"trainer.strategy={strategy} must be {allowed} on {devices} device{'s' * (devices > 1)}")
    if config.run.name != "train":
        complaints.append(f"run={config.run.name}: peers are compared in training; leave run= out")
    if config.resume is not None:
        complaints.append(f"resume={config.resume}: peers start anew; leave resume= out")
    if config.profile != "off":
        complaints.append(f"profile={config.profile}: peers are not profiled; leave profile= out")
    if complaints:
        raise ValueError("\n".join(complaints))


def mark(record: RunRecord, name: str, *, backend: str) -> None:
    """Write into ``record`` that a peer ran, and which, so that nobody takes it for a strategy of ours."""
    peer = PEERS[name]
    version = metadata.version(peer.library)
    strategy = {"name": PEER, "arm": name, peer.library: version}
    record.strategies = [strategy | ({"backend": backend} if peer.compiles else {})]
    record.label = f"{PEER} {name}"
    record.versions[peer.library] = version
    record.notes.append(f"{PEER}, no strategy of ours: {peer.about} ({peer.library} {version})")


if __name__ == "__main__":
    sys.exit(main())
