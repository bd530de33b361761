"""The run around a peer's script, and the list of peers, ``ARMS``.

Every peer trains our task's module on our task's data under our telemetry; transformers' Trainer trains transformers'
own network of the same sizes. As arms of a sweep they alternate with ours:

    crucible train -m experiment=gpt2 repeat=cold hydra.launcher.rounds=5 \
        'hydra.launcher.arms=[eager,regional,"eager run=peer run.peer=loop_compile"]'
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module, metadata, util
from typing import Any

import lightning as L
import torch
from torch import distributed, nn

from scripts.peers.work import Work
from trainer.build import Job, compile_callback, device_of, on_cuda, resolve_precision
from trainer.console import announce
from trainer.process import StopRequest
from trainer.settings import PEER, Config, Peer
from trainer.telemetry.hardware import device_name, note_machine
from trainer.telemetry.record import RunRecord

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "loop_eager": ("loop", {"compiled": False}),
    "loop_compile": ("loop", {}),
    "loop_reduce_overhead": ("loop", {"mode": "reduce-overhead"}),
    "loop_captured": ("loop_captured", {}),
    "lightning_eager": ("lightning_trainer", {"compiled": False}),
    "lightning_compile": ("lightning_trainer", {}),
    "lightning_reduce_overhead": ("lightning_trainer", {"mode": "reduce-overhead"}),
    "accelerate_regional": ("accelerate_regional", {}),
    "transformers_eager": ("transformers_trainer", {"compiled": False}),
    "transformers_compiled": ("transformers_trainer", {}),
}
"""By the names of ``trainer.settings.PEERS``: the script, and the arguments of its ``train``."""
LIBRARIES = ("lightning", "accelerate", "transformers")
"""Packages that peers are named after, torch itself for the others; records hold their versions."""


class PeerJob(Job):
    """The parts of one peer's training."""

    def train(self, stop: StopRequest) -> None:
        """Seed and build in the order of our own runs, so that weights and batches are theirs; train.

        Raises ValueError before any work, RuntimeError where a peer that compiles has compiled nothing.
        """
        config, record, mode = self._config, self._record, self._config.run
        assert isinstance(mode, Peer)
        record_peer(record, mode, config)
        record.device, record.precision = device_name(device_of(config.trainer)), resolve_precision(config.trainer)
        announce(self._console, record, self._run_dir)
        self._compile = compile_callback(config, record)
        telemetry = self._compile.telemetry  # of a peer, nothing else of it is used
        with process_group(config, captured=mode.peer == "loop_captured"):
            L.seed_everything(config.seed, verbose=False)
            data = config.task.build_data(seed=config.seed)
            module = config.task.build_module(max_steps=config.trainer.max_steps)
            work = Work(config, module, data, telemetry, self._run_dir, mode.backend)
            own = sum(parameter.numel() for parameter in module.parameters())
            script, arguments = ARMS[mode.peer]
            telemetry.compiler.start()
            try:
                import_module(f"scripts.peers.{script}").train(work, **arguments)
            finally:
                telemetry.compiler.stop()
            telemetry.fill(record, None, together=True)
            loop: Any = work
            note_machine(record, loop)
            if script == "transformers_trainer":
                note_network(record, module.get_submodule("net"), own)
        record.skipped_items = getattr(data, "skipped", {})
        if not mode.peer.endswith("_eager") and not record.graphs:
            reason = "".join(f": {event.reason}" for event in telemetry.compiler.events[:1])
            raise RuntimeError(f"{record.label} compiled no graph{reason}")


def record_peer(record: RunRecord, mode: Peer, config: Config) -> None:
    """Write into ``record`` which peer runs, of which version. Raises ValueError for one that cannot run here."""
    library = next((name for name in LIBRARIES if mode.peer.startswith(name)), "torch")
    if any(util.find_spec(name) is None for name in (library, *("accelerate",) * (library == "transformers"))):
        raise ValueError(f"run.peer={mode.peer} needs {library}: pip install -e '.[peers]', or leave it out")
    if library == "transformers":
        from scripts.peers.transformers_trainer import matching_network

        matching_network(config.task)  # refuses
    if mode.peer == "loop_captured" and not on_cuda(config.trainer):
        raise ValueError("run.peer=loop_captured: a CUDA graph takes a CUDA device, leave it out here")
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != (config.trainer.devices or 1):
        raise ValueError(
            f"trainer.devices={config.trainer.devices or 1}: {started} processes were started; several take python -m "
            "torch.distributed.run --standalone --nproc-per-node=N -m trainer, which a sweep does by itself"
        )
    record.strategies[0][library] = record.versions[library] = version = metadata.version(library)
    record.strategies[0]["backend"] = mode.backend
    record.notes.append(f"{PEER}, no strategy of ours ({library} {version})")


@contextlib.contextmanager
def process_group(config: Config, *, captured: bool = False) -> Iterator[None]:
    """Inside, the processes that torchrun has started are one group, of which steps can be ``captured``."""
    if config.trainer.devices in (None, 1):
        yield
        return
    if on_cuda(config.trainer):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        if captured:  # NCCL's watchdog queries events, which no capture allows
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def note_network(record: RunRecord, model: nn.Module, own: int) -> None:
    """Write that not the task's network, of ``own`` parameters, was trained, but ``model``."""
    name, parameters = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
    record.report["network"] = {"class": f"transformers.{name}", "parameters": parameters, "task_parameters": own}
    record.notes.append(f"trained transformers' own {name} of {parameters:,} parameters; the task's has {own:,}")
