"""Peers: how people compile without this project, by name, and what of a configuration their loops can do.

Imports no torch, so that a peer that cannot run is refused at once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.runs import PEER
from trainer.settings import Config
from trainer.telemetry.record import RunRecord

OVERRIDE = f"{PEER}="
"""How a command names a peer: ``peer=loop_eager``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way to train that is not ours."""

    about: str
    """What runs, in a few words for its record."""
    library: str = "torch"
    """Package that it is the usual way of, whose version its record tells."""
    compiles: bool = True
    """Whether anything is compiled, without which it has failed."""


PEERS = {
    "loop_eager": Peer(about="a hand-written loop, nothing compiled", compiles=False),
    "loop_compile": Peer(about="a hand-written loop, the network replaced by torch.compile(network)"),
    "lightning_compile": Peer(
        about="L.Trainer(...).fit(torch.compile(module)), which compiles the whole training_step; Lightning's own "
        "logger and progress bar",
        library="lightning",
    ),
    "accelerate_regional": Peer(
        about="Accelerator(dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=True)) and its loop",
        library="accelerate",
    ),
}

REQUIRED: dict[str, tuple[object, ...]] = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "devices": (1,),
    "strategy": ("auto",),
    "precision": ("auto", "32-true", "bf16-mixed"),
    "accumulate_grad_batches": (1,),
    "deterministic": (False,),
    "val_every_n_steps": (0,),
}
"""Values of ``trainer.<name>`` under which all peers do the same work as we."""


def refuse(names: Sequence[str]) -> None:
    """Raise ValueError for peers that do not exist or whose library is not installed."""
    if unknown := [name for name in names if name not in PEERS]:
        raise ValueError(f"{OVERRIDE}{unknown[0]} is not one of {tuple(PEERS)}")
    for name in names:
        library = PEERS[name].library
        if importlib.util.find_spec(library) is None:
            others = " ".join(other for other in PEERS if PEERS[other].library != library)
            raise ValueError(
                f"{OVERRIDE}{name} needs {library}: pip install 'crucible-train[peers]', "
                f"or leave it out with --peers {others}"
            )


def refuse_workload(config: Config) -> None:
    """Raise ValueError, a line for each complaint, for what the peers' loops cannot do as ours does it."""
    complaints = [
        f"trainer.{name}={getattr(config.trainer, name)!r} must be "
        f"{f'one of {allowed}' if len(allowed) > 1 else allowed[0]}: peers know nothing else"
        for name, allowed in REQUIRED.items()
        if getattr(config.trainer, name) not in allowed
    ]
    if config.run.name != "train":
        complaints.append(f"run={config.run.name}: peers are compared in training; leave run= out")
    if config.resume is not None:
        complaints.append(f"resume={config.resume}: peers start anew; leave resume= out")
    if config.profile != "off":
        complaints.append(f"profile={config.profile}: peers are not profiled; leave profile= out")
    if complaints:
        raise ValueError("\n".join(complaints))


def mark(record: RunRecord, name: str, *, backend: str) -> None:
    """Say in ``record`` that a peer ran, and which, so that nobody takes it for a strategy of ours."""
    peer = PEERS[name]
    version = importlib.metadata.version(peer.library)
    told = {"name": PEER, "arm": name, peer.library: version}
    record.strategies = [told | ({"backend": backend} if peer.compiles else {})]
    record.label = f"{PEER} {name}"
    record.versions[peer.library] = version
    record.notes.append(f"{PEER}, no strategy of ours: {peer.about} ({peer.library} {version})")
