"""The parts of a peer's training, and the list of peers, ``ARMS``.

Every peer trains our task's module on our task's data under our telemetry; transformers' Trainer trains transformers'
own network of the same sizes. As arms of a sweep they alternate with ours:

    crucible train -m experiment=gpt2 repeat=cold hydra.launcher.rounds=5 \
        'hydra.launcher.arms=[eager,regional,"eager run=peer run.peer=loop_compile"]'
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata, util
from typing import Any

import lightning as L
import torch
from torch import distributed, nn

from strategies.loop_protocol import Loop
from trainer.build import Job, compile_callback, device_of, on_cuda, precision_arguments, resolve_precision
from trainer.console import announce
from trainer.loops.lightning import LightningLoop
from trainer.peers.peer_loops import (
    AcceleratedLoop,
    Measured,
    PeerLoop,
    TrainingStep,
    Work,
    captured_steps,
    optimizer_and_schedule,
    placed,
)
from trainer.process import StopRequest
from trainer.settings import PEER, Config, Peer
from trainer.telemetry.hardware import device_name, note_machine
from trainer.telemetry.record import RunRecord

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
            work = Work(
                config=config,
                module=module,
                data=data,
                telemetry=telemetry,
                directory=self._run_dir,
                backend=mode.backend,
            )
            own = sum(parameter.numel() for parameter in module.parameters())
            telemetry.compiler.start()
            try:
                loop = ARMS[mode.peer](work)
            finally:
                telemetry.compiler.stop()
            telemetry.fill(record, None, together=True)
            note_machine(record, loop)
            if mode.peer.startswith("transformers"):
                note_network(record, loop.module, own)
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
        from trainer.peers.transformers_trainer import matching_network

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


def loop(work: Work, *, compiled: bool = True, mode: str | None = None, captured: bool = False) -> Loop:
    """A hand-written loop, ``network = torch.compile(network, mode=mode)`` for what the task declares as its network;
    where it is sharded, each block compiled in place before. ``captured`` replays whole steps as one CUDA graph; on
    several devices each block and part is compiled in place then, and the optimizer steps local shards."""
    module = placed(work.module, work.device)
    several = distributed.is_initialized()
    sharded = several and work.sharded
    blocks = work.blocks() if sharded or (several and captured) else []
    paths: Sequence[str] = ()
    if compiled:
        children = [name for name, child in work.module.named_children() if any(True for _ in child.parameters())]
        declared = work.config.task.declare()
        paths = blocks or declared.whole or children
        if several and captured:
            paths = [*blocks, *declared.parts]
    for path in paths:
        network: Any = module.get_submodule(path)
        if blocks:
            network.compile(backend=work.backend, mode=mode)
        else:
            network = torch.compile(network, backend=work.backend, mode=mode)
            module.set_submodule(path, network)
    # DDP that is to be captured is made on a side stream: https://docs.pytorch.org/docs/stable/notes/cuda.html
    aside = captured and several and work.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if aside else contextlib.nullcontext():
        wrapped = wrap(work, module, blocks) if several else None
    trained = PeerLoop(work, *optimizer_and_schedule(module))
    trained.wrapped = wrapped
    give_back = None
    if captured:
        if sharded:
            trained.step_local_shards()
        give_back = trained.wrap_step(captured_steps(trained))
    trained.train_on(work.loader())
    if give_back is not None:
        give_back()
        gc.collect()  # a graph that is still there holds NCCL's communicators, and the group waits for them at its end
    if captured and not trained.replays:
        raise RuntimeError("run.peer=loop_captured replayed no step: it captures one after the first steps")
    return trained


def wrap(work: Work, module: L.LightningModule, blocks: Sequence[str]) -> nn.Module:
    """The training step under DDP; or sharded by FSDP2, each block a unit, as torchtitan does it."""
    step = TrainingStep(module)
    if not work.sharded:
        device = [work.device] if work.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(step, device_ids=device, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if resolve_precision(work.config.trainer) == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for path in blocks:
        fully_shard(module.get_submodule(path), mp_policy=policy)
    fully_shard(step, mp_policy=policy)
    return step


def lightning(work: Work, *, compiled: bool = True, mode: str | None = None) -> Loop:
    """Lightning as its documentation compiles: of a compiled module, the Trainer compiles ``training_step`` whole.
    https://lightning.ai/docs/pytorch/stable/advanced/compile.html"""
    settings = work.config.trainer
    trainer = L.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices or 1,
        strategy=settings.strategy,
        **precision_arguments(settings),  # its own bf16 refuses to clip gradients of a fused optimizer
        max_steps=settings.max_steps,
        max_epochs=-1,
        gradient_clip_val=settings.gradient_clip_val,
        limit_val_batches=0,
        log_every_n_steps=settings.log_every_n_steps,
        enable_checkpointing=False,
        callbacks=[Measured(work.telemetry)],
        default_root_dir=work.directory,
    )
    module: Any = torch.compile(work.module, backend=work.backend, mode=mode) if compiled else work.module
    trainer.fit(module, datamodule=work.data)
    return LightningLoop(trainer)


def accelerate_regional(work: Work) -> Loop:
    """Regional compilation as accelerate has it: of a module built anew, the blocks and what is between them.
    https://huggingface.co/docs/accelerate/usage_guides/compilation"""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin

    precision = resolve_precision(work.config.trainer)
    several: dict[str, Any] = {}
    if distributed.is_initialized() and work.sharded:
        kinds = {type(work.module.get_submodule(path)).__name__ for path in work.blocks()}
        several["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(kinds),
        )
    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision="bf16" if precision == "bf16-mixed" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend=work.backend, use_regional_compilation=True),
        **several,
    )
    if several and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError("trainer.strategy=fsdp2: accelerate shards on accelerators alone, and this is a CPU")
    module = placed(work.module, work.device)
    optimizer, schedule = optimizer_and_schedule(module)
    model: Any
    loader = work.loader()
    if distributed.is_initialized():
        # The loader is split already, and accelerate's schedule would step once for each process.
        model, optimizer = accelerator.prepare(TrainingStep(module), optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(TrainingStep(module), optimizer, loader)
        schedule = None if schedule is None else accelerator.prepare(schedule)
    trained = AcceleratedLoop(work, optimizer, schedule)
    trained.wrapped, trained.accelerator = model, accelerator
    trained.train_on(loader)
    return trained


def transformers_trainer(work: Work, *, compiled: bool = True) -> Loop:
    """See ``trainer.peers.transformers_trainer``, which alone imports transformers."""
    from trainer.peers import transformers_trainer

    return transformers_trainer.train(work, compiled=compiled)


ARMS: dict[str, Callable[[Work], Loop]] = {
    "loop_eager": partial(loop, compiled=False),
    "loop_compile": loop,
    "loop_reduce_overhead": partial(loop, mode="reduce-overhead"),
    "loop_captured": partial(loop, captured=True),
    "lightning_eager": partial(lightning, compiled=False),
    "lightning_compile": lightning,
    "lightning_reduce_overhead": partial(lightning, mode="reduce-overhead"),
    "accelerate_regional": accelerate_regional,
    "transformers_eager": partial(transformers_trainer, compiled=False),
    "transformers_compiled": transformers_trainer,
}
"""By the names of ``trainer.settings.PEERS``."""
