"""Settings: the root configuration ``Config`` and the loop's own ``TrainerConfig``.

Plain dataclasses: whoever runs a task without the command line builds them directly, without Hydra and without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from strategies.base import Strategy, ordered
from tasks.base import Task
from trainer.guards import ON_COMPILE_ERROR, ON_DIFFERENCE, ON_SLOWER, PARITY
from trainer.run_files import find_checkpoint
from trainer.telemetry import PROFILE

PRECISIONS = (
    *("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    *("transformer-engine", "transformer-engine-float16"),
)
PROGRESS = ("auto", "live", "plain", "none")
SUMMARY = ("short", "full")
MATMUL_PRECISIONS = ("highest", "high", "medium")
ON_NONFINITE_LOSS = ("fail", "warn")
REPEAT = ("cold", "warm")
AT_LEAST: dict[str, int] = {
    "num_nodes": 1,
    "max_steps": 1,
    "accumulate_grad_batches": 1,
    "val_every_n_steps": 0,
    "val_batches": 1,
    "log_every_n_steps": 1,
    "warmup_steps": 0,
    "checkpoint_every_n_steps": 0,
}
"""Smallest value of each counter of ``TrainerConfig``; null passes."""


def invalid_values(
    part: object, prefix: str, choices: Mapping[str, tuple[str, ...]], least: Mapping[str, int] | None = None
) -> list[str]:
    """A complaint for each field of ``part`` that is less than it must be, or not one of its choices."""
    values = {name: getattr(part, name) for name in (*(least or ()), *choices)}
    few = {name: number for name, number in (least or {}).items() if values[name] is not None and values[name] < number}
    return [
        *(f"{prefix}{name}={values[name]} must be at least {number}" for name, number in few.items()),
        *(
            f"{prefix}{name}={values[name]!r} is not one of {of}"
            for name, of in choices.items()
            if values[name] not in of
        ),
    ]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """How long and on what to train. Values that Lightning also has mean what Lightning's Trainer documents."""

    accelerator: str = "auto"
    """``auto``, ``cpu``, ``gpu``, ``cuda``, ``mps``, ... as in ``lightning.Trainer``."""
    devices: int | str | None = None
    """Number of devices on each host, -1 or ``auto`` for all of them, or a list of indices in quotes (``'0,1'``); null
    = 1, or one for each process that torchrun or srun has started there."""
    num_nodes: int | None = None
    """Number of hosts; null = as many as torchrun or srun has started processes on, else 1."""
    strategy: str = "auto"
    """Lightning's way of training on several devices: ``auto``, ``ddp``, ``fsdp2`` (``fully_shard``), ``fsdp``, ..."""
    reshard_after_forward: bool = True
    """``strategy=fsdp2``: whether blocks free their gathered parameters after the forward and gather them again for the
    backward; false = faster, for memory of all parameters."""
    reshard_after_backward: bool = True
    """``strategy=fsdp2`` with accumulation: whether blocks free their gathered parameters after the backward of each
    micro-batch, not of the last one alone; false = fewer gathers, for memory of all parameters."""
    reduce_each_micro_batch: bool = False
    """``strategy=fsdp2`` with accumulation: whether each micro-batch reduces its gradients, so that nobody holds whole
    ones; false = only the last one reduces, for memory of all gradients in float32."""
    precision: str = "auto"
    """One of ``PRECISIONS``; ``auto`` = bf16-mixed on a CUDA device that has bfloat16, else 32-true."""
    max_steps: int = 600
    """Optimizer steps to train, counted from the start of the first run when one is resumed."""
    accumulate_grad_batches: int = 1
    """Batches whose gradients make up one optimizer step."""
    gradient_clip_val: float | None = 1.0
    """Largest norm of the gradients; null = no clipping."""
    val_every_n_steps: int = 200
    """Optimizer steps between validations; 0 = never validate."""
    val_batches: int | None = None
    """Batches of one validation; null = all of them."""
    log_every_n_steps: int = 50
    """Optimizer steps between points in TensorBoard."""
    warmup_steps: int = 5
    """First optimizer steps left out of steady-state figures, even when nothing compiles."""
    checkpoint_every_n_steps: int | None = 200
    """Optimizer steps between checkpoints; 0 = only at the end; null = only when a run is stopped before it."""
    sharded_checkpoints: bool = True
    """With ``strategy=fsdp2``, each process writes its part into a directory; false = the first one writes one file."""
    async_checkpoints: bool = False
    """Copy a checkpoint to host memory and write it while training continues, which takes its size there."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms (slower); losses then repeat for one seed on one machine."""
    progress: str = "auto"
    """One of ``PROGRESS``: a live display, plain lines, or nothing; ``auto`` = live on a terminal, else plain."""
    summary: str = "short"
    """One of ``SUMMARY``: what is printed below the verdict at the end, the figures that matter most or all; the record
    has all."""
    matmul_precision: str = "high"
    """One of ``MATMUL_PRECISIONS``: precision of float32 matrix products, as ``torch.set_float32_matmul_precision``."""
    measure_peak: bool | None = None
    """Whether a large product of matrices is timed first (a third of a second on a GPU), as the peak for utilisation
    beside the datasheet's; null = on a CUDA device only."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        choices = {
            "precision": PRECISIONS,
            "progress": PROGRESS,
            "summary": SUMMARY,
            "matmul_precision": MATMUL_PRECISIONS,
        }
        complaints = invalid_values(self, "trainer.", choices, AT_LEAST)
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            complaints.append(f"trainer.gradient_clip_val={self.gradient_clip_val} must be above 0, or null for none")
        for name in ("reshard_after_forward", "reshard_after_backward", "reduce_each_micro_batch"):
            value = getattr(self, name)
            if self.strategy != "fsdp2" and value is not (name != "reduce_each_micro_batch"):
                complaints.append(
                    f"trainer.{name}={str(value).lower()} is for trainer.strategy=fsdp2, not {self.strategy}"
                )
        if self.strategy == "fsdp2" and self.precision == "16-mixed":
            complaints.append(
                "trainer.precision=16-mixed: the scaler of float16 knows no shards; trainer.strategy=fsdp2 takes "
                "bf16-mixed, bf16-true, 16-true and 32-true"
            )
        if isinstance(self.devices, int) and self.devices < 1 and self.devices != -1:
            complaints.append(f"trainer.devices={self.devices} must be at least 1, or -1 for all")
        if complaints:
            raise ValueError("\n".join(complaints))


@dataclass(kw_only=True, slots=True)
class Train:
    """Train the task, with validations and checkpoints; how long is for ``trainer`` to say."""

    name: ClassVar[str] = "train"
    """Value of ``run=`` and of ``RunRecord.run``."""
    job: ClassVar[str] = "trainer.build.Job"
    """Class of what trains, a ``trainer.build.Job``."""


PEER = "peer"
PEERS = (
    *("loop_eager", "loop_compile", "loop_reduce_overhead", "loop_captured"),
    *("lightning_eager", "lightning_compile", "lightning_reduce_overhead"),
    *("accelerate_regional", "transformers_eager", "transformers_compiled"),
)
PEER_BACKENDS = ("inductor", "aot_eager", "eager")
PEERS_REQUIRE: dict[str, tuple[object, ...]] = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "num_nodes": (None, 1),
    "precision": ("auto", "32-true", "bf16-mixed"),
    "accumulate_grad_batches": (1,),
    "deterministic": (False,),
    "val_every_n_steps": (0,),
}
"""Values of ``trainer.<name>`` under which all peers do the same work as we."""


@dataclass(kw_only=True, slots=True)
class Peer(Train):
    """Train the task as people do without this project, measured by the same code."""

    name: ClassVar[str] = PEER
    job: ClassVar[str] = "scripts.peers.job.PeerJob"

    peer: str = "loop_eager"
    """One of ``PEERS``: a hand-written loop or plain Lightning, each eager, under torch.compile or under its mode
    reduce-overhead; a hand-written loop with its whole step in one CUDA graph; accelerate's regional compilation;
    transformers' Trainer on transformers' own network."""
    backend: str = "inductor"
    """One of ``PEER_BACKENDS``: of its ``torch.compile``."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        if complaints := invalid_values(self, "run.", {"peer": PEERS, "backend": PEER_BACKENDS}):
            raise ValueError("\n".join(complaints))


RUN_MODES: dict[str, type[Train]] = {mode.name: mode for mode in (Train, Peer)}


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything that one run is made of; the root of the configuration."""

    task: Task
    """What is learned."""
    run: Train = field(default_factory=Train)
    """Whether we train it, or a peer does."""
    compile: dict[str, Strategy] = field(default_factory=dict)
    """Strategies by name; empty is eager."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long and on what to train."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    resume: str | None = None
    """Run directory or checkpoint file to go on from; null = start anew."""
    repeat: str | None = None
    """One of ``REPEAT``, in a sweep (``-m repeat=cold,warm``): the compile caches that a cell starts with, ``cold`` =
    empty ones of its own; ``warm`` = those that the cold cell of its pair has filled; null = what
    ``hydra.launcher.caches`` says. A single run starts with the machine's, as they are."""

    parity: str = "on"
    """One of ``PARITY``: what runs compiled must agree with eager within what eager differs from itself, at its first
    call and at audits of later steps. ``strict`` = half that tolerance, ``off`` = not compared: see docs/guards.md."""
    on_difference: str = "eager"
    """One of ``ON_DIFFERENCE``: what is compiled and not eager's runs eager from then on, with a warning, or ends the
    run before it saves again."""
    on_compile_error: str = "eager"
    """One of ``ON_COMPILE_ERROR``: what does not compile runs eager, with a warning, or ends the run."""
    on_slower: str = "warn"
    """One of ``ON_SLOWER``: a compiled run that is slower than eager says so, or continues in eager."""

    on_nonfinite_loss: str = "fail"
    """One of ``ON_NONFINITE_LOSS``: the first training step whose loss is NaN or infinite ends the run, and the last
    finite checkpoint stays; or the run continues, with a warning, and saves as before."""

    profile: str = "off"
    """``off`` or ``on``: torch's profiler records a few steady steps: a trace, the GPU's idle share, and the kernels
    or operators that take longest. Those steps are no part of the steady figures."""

    def __post_init__(self) -> None:
        """Check the fields. Raises one ValueError that holds all complaints, a line each."""
        complaints = []
        if not 0 <= self.seed < 2**32:
            complaints.append(f"seed={self.seed} must be at least 0 and below 2**32")
        choices = {"parity": PARITY, "on_compile_error": ON_COMPILE_ERROR, "on_slower": ON_SLOWER}
        choices |= {"on_difference": ON_DIFFERENCE, "on_nonfinite_loss": ON_NONFINITE_LOSS, "profile": PROFILE}
        complaints += invalid_values(self, "", choices)
        if self.repeat is not None and self.repeat not in REPEAT:
            complaints.append(f"repeat={self.repeat!r} is not one of {REPEAT}, or null")
        complaints += self._of_peers()
        try:
            ordered(strategy for strategy in self.compile.values() if strategy is not None)  # None: refused by itself
        except ValueError as error:
            complaints.append(str(error))
        if complaints:
            raise ValueError("\n".join(complaints))

    def _of_peers(self) -> Iterator[str]:
        """What the loops of peers cannot do as ours does it."""
        if not isinstance(self.run, Peer):
            return
        settings, run = self.trainer, f"run.peer={self.run.peer}"
        for name, allowed in PEERS_REQUIRE.items():
            if (value := getattr(settings, name)) not in allowed:
                only = f"one of {allowed}" if len(allowed) > 1 else allowed[0]
                yield f"trainer.{name}={value!r} must be {only}: peers know nothing else"
        devices = settings.devices or 1
        strategies = ("auto",) if devices == 1 else ("auto", "ddp", "fsdp2")
        if not isinstance(devices, int) or devices < 1:
            yield f"trainer.devices={devices} must be a number of devices for a peer"
        elif settings.strategy not in strategies:
            yield f"trainer.strategy={settings.strategy} must be one of {strategies} for a peer on {devices} devices"
        elif settings.strategy == "fsdp2" and self.run.peer.startswith("lightning"):
            yield f"trainer.strategy=fsdp2: {run}: plain Lightning leaves the sharding to the module's configure_model"
        elif settings.strategy == "fsdp2" and self.run.peer.startswith("transformers"):
            yield f"trainer.strategy=fsdp2: {run}: its Trainer shards by accelerate's settings alone, take ddp"
        for given, what in ((self.compile, "compile"), (self.resume, "resume"), (self.profile != "off", "profile")):
            if given:
                yield f"{what}= is not for a peer: leave it out with {run}"


# ---- is what a run names on this machine at all? ---------------------------------------------------------------------
# Looked at before torch is imported, which takes seconds.

DEVICES = Path("/dev")
GPUS = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""What Linux drivers of GPUs leave there: NVIDIA's, of its boards with a processor too, AMD's, and that of WSL 2."""
HIDES = "CUDA_VISIBLE_DEVICES"


def require_present(config: Config, *, resumes: bool = True) -> None:
    """Raise ValueError where the data, the checkpoint (if it ``resumes``) or the GPU that ``config`` names is not
    there. What cannot be told without torch is not refused here."""
    asked = config.trainer.accelerator
    if asked in ("gpu", "cuda") and (reason := no_gpu()) is not None:
        raise ValueError(f"trainer.accelerator={asked}: {reason}")
    if config.resume is not None and resumes:
        find_checkpoint(config.resume)
    config.task.check()


def no_gpu() -> str | None:
    """Why there is certainly none; None where there may be one."""
    if sys.platform != "linux":
        return None
    if not any(True for name in GPUS for _ in DEVICES.glob(name)):
        return "this machine has no GPU"
    hidden = os.environ.get(HIDES)
    return f"{HIDES}={hidden} hides all GPUs" if hidden in ("", "-1") else None
