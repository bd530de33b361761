"""One peer, trained and timed in this process: ``python -m scripts.peers.cell peer=loop_compile experiment=gpt2``

A peer is how people compile without this project. ``scripts.benchmark_peers`` runs several of them and ours in rounds.
Overrides are those of the trainer; ``peer=`` names the peer, as ``compile=`` would name strategies. Torch is imported
only by what trains, so that a peer that cannot run is refused at once.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from trainer import errors
from trainer.config import compose
from trainer.process import importing
from trainer.report.runs import PEER
from trainer.settings import Config
from trainer.sweep.environment import end_with_parent, starting_caches
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the peer; returns 0 finished, 1 failed, 2 refused before any work, 128 + signal interrupted."""
    end_with_parent()
    options = parse(arguments)
    try:
        config = compose(options.overrides, config_dir=options.config_dir)
        if config.compile:
            raise ValueError(f"compile={'+'.join(config.compile)}: a peer takes no strategies of ours; leave it out")
        refuse([options.peer], config)
        refuse_workload(config)
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != (config.trainer.devices or 1):
            raise ValueError(
                f"trainer.devices={config.trainer.devices or 1}: {started} processes were started; several take "
                "python -m torch.distributed.run --standalone --nproc-per-node=N -m scripts.peers.cell"
            )
        with starting_caches(config.repeat, options.out):
            with importing():  # only now, as it reads where its caches are
                from scripts.peers.run import run

            record = run(options.peer, config, run_dir=options.out, command=options.command, backend=options.backend)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options; ``command`` is all of them but where the run lies."""
    parser = argparse.ArgumentParser(prog="python -m scripts.peers.cell", description=__doc__)
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
