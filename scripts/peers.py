"""Peers: what people do without this project, one run from configuration to record, by the same ruler.

Every peer trains our task's module on our task's data under our telemetry.
"""

from __future__ import annotations

import collections
import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, distributed, nn

from scripts.benchmark_peers import PEERS, mark
from strategies.credentials import hidden
from strategies.errors import one_line
from strategies.loop import Loop
from strategies.regions import expand_blocks, find_containers
from tasks.loading import ResumableDataModule
from trainer.build import batch_counter, device_of, on_cuda, precision_arguments, resolve_precision
from trainer.console import ERROR_LOG
from trainer.loops.lightning import LightningLoop
from trainer.loops.plain import PlainLoop
from trainer.loops.training import note_machine
from trainer.process import Interrupted, StopRequest, process_settings
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry import hardware
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry, fill_in

TORCH = Path(torch.__file__).parent

Trained = tuple[Loop, Sequence[Any]]
"""The loop, and the functions that were handed to the compiler."""


class NotCompiled(RuntimeError):
    """A peer that compiles has compiled nothing."""


def run(name: str, config: Config, *, run_dir: Path, command: list[str], backend: str) -> RunRecord:
    """Train ``config.task`` as the peer ``name`` does and leave a record in ``run_dir``, however it ends."""
    record = new_record(config, command)
    mark(record, name, backend=backend)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        record.save(run_dir)
    try:
        with process_settings(config.trainer), StopRequest(print), together(config):
            _train(name, config, record, run_dir, backend)
        record.status = "finished"
    except Interrupted as interrupted:
        record.status, record.signal, record.reason = "interrupted", interrupted.signum, str(interrupted)
    except Exception as error:
        record.status, record.reason = "failed", one_line(error)
        if first:
            (run_dir / ERROR_LOG).write_text(hidden(traceback.format_exc()), encoding="utf-8")
        else:
            traceback.print_exc()
    finally:
        record.total_seconds = hardware.process_age_seconds()
        if first:
            record.save(run_dir)
    return record


@contextlib.contextmanager
def together(config: Config) -> Iterator[None]:
    """Inside, the processes that torchrun has started are one group."""
    if config.trainer.devices in (None, 1):
        yield
        return
    if on_cuda(config.trainer):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _train(name: str, config: Config, record: RunRecord, run_dir: Path, backend: str) -> None:
    """Seed and build in the order of our own runs, so that weights and batches are theirs; train; fill in the record.

    Raises NotCompiled.
    """
    telemetry = Telemetry(
        count=batch_counter(config.task, config.task.training_flops),
        warmup_steps=config.trainer.warmup_steps,
        measure_peak=config.trainer.measure_peak,
    )
    L.seed_everything(config.seed, verbose=False)
    data = config.task.build_data(seed=config.seed)
    module = config.task.build_module(max_steps=config.trainer.max_steps)
    work = Work(config=config, module=module, data=data, telemetry=telemetry, directory=run_dir, backend=backend)
    telemetry.compiler.start()
    try:
        loop, functions = ARMS[name](work)
    finally:
        telemetry.compiler.stop()
    fill_in(record, loop, telemetry, None, together=loop.world_size > 1)
    note_machine(record, loop)
    record.skipped_items = config.task.skipped_items(data)
    if PEERS[name].compiles:
        _note_compiler(record, telemetry.compiler, functions)


def _note_compiler(record: RunRecord, compiler: CompilerMonitor, functions: Sequence[Any]) -> None:
    """Write what was compiled. Raises NotCompiled when that is nothing of ``functions``."""
    record.take(compiler.figures())
    record.events = list(compiler.events)
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    # Of a forward that torch wrote, the compiler enters a frame of its own, which does not show whose it is.
    frames = [
        (code.co_filename, code.co_firstlineno) for code in codes if not Path(code.co_filename).is_relative_to(TORCH)
    ]
    done = compiler.compiled_frames()
    compiled = [frame in done for frame in frames]
    record.regions, record.regions_compiled = len(frames), sum(compiled)
    if not record.graphs or (frames and not any(compiled)):
        raise NotCompiled(
            f"{record.label} compiled {record.graphs or 0} graphs and none of its {len(frames)} regions"
            + "".join(f"; {event.reason}" for event in compiler.events[:1])
        )
    if missing := len(frames) - sum(compiled):
        record.notes.append(f"{record.label}: {missing} of {len(frames)} regions were not compiled")


@dataclass(kw_only=True, slots=True)
class Work:
    """What a peer is given to train."""

    config: Config
    module: L.LightningModule
    data: L.LightningDataModule
    telemetry: Telemetry
    directory: Path
    backend: str
    """Of ``torch.compile``."""

    @property
    def device(self) -> torch.device:
        """The device that Lightning would take."""
        device = device_of(self.config.trainer)
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device

    @property
    def sharded(self) -> bool:
        """Whether several processes train by FSDP2; else by DDP."""
        return self.config.trainer.strategy == "fsdp2"

    def blocks(self) -> list[str]:
        """Paths of the blocks that repeat."""
        containers = self.config.task.declare().blocks or [one.path for one in find_containers(self.module)]
        return expand_blocks(self.module, containers)

    def loader(self) -> Any:
        """This process's training batches, still on the host. Raises ValueError for data that cannot be split so."""
        if distributed.is_initialized():
            if not isinstance(self.data, ResumableDataModule):
                raise ValueError(f"{type(self.data).__name__} does not split its batches over processes by itself")
            trainer: Any = SimpleNamespace(
                world_size=distributed.get_world_size(), global_rank=distributed.get_rank(), fit_loop=None
            )
            self.data.trainer = trainer
        self.data.prepare_data()
        self.data.setup("fit")
        return self.data.train_dataloader()


class PeerLoop(PlainLoop):
    """A loop without Lightning, as people write it; ``fit`` is measured as our own runs are."""

    def __init__(self, work: Work, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        settings = work.config.trainer
        super().__init__(
            work.module,
            optimizer,
            schedule=schedule,
            clip=settings.gradient_clip_val,
            precision=resolve_precision(settings),
            max_steps=settings.max_steps,
            directory=str(work.directory),
            log_every_n_steps=settings.log_every_n_steps,
        )
        self._work = work
        if distributed.is_initialized():
            self.world_size, self.is_first_process = distributed.get_world_size(), distributed.get_rank() == 0

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        if distributed.is_initialized():
            distributed.all_reduce(tensor, {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}[how])
        return tensor

    def forward_loss(self, arguments: Mapping[str, Any]) -> Tensor | None:
        if self.wrapped is None:
            return super().forward_loss(arguments)
        with self.autocast():
            loss: Tensor = self.wrapped(arguments["batch"])
        return loss

    def to_device(self, batch: Any) -> Any:
        return self._work.data.transfer_batch_to_device(batch, self.device, 0)

    def train_on(self, loader: Iterable[Any]) -> None:
        """Take the configured steps on batches of ``loader``."""
        measured = Measured(self._work.telemetry)
        measured.telemetry.start(self)
        collections.deque(self.fit(loader, measured), maxlen=0)
        measured.telemetry.finish()


def placed(module: L.LightningModule, device: torch.device) -> L.LightningModule:
    """Give the module its weights and its device, as Lightning does before it asks for optimizers, and let it train."""
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    module.trainer = trainer
    module.configure_model()
    module.trainer = None  # ``self.log`` of a module in a hand-written loop goes nowhere
    return module.to(device).train()


def optimizer_and_schedule(module: L.LightningModule) -> tuple[torch.optim.Optimizer, Any]:
    """What ``configure_optimizers`` returned, taken apart. Raises ValueError for what such a loop has no place for."""
    configured: Any = module.configure_optimizers()
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    schedule = configured.get("lr_scheduler") if isinstance(configured, dict) else None
    if not isinstance(schedule, dict) or schedule.get("interval") != "step":
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers: a hand-written loop takes one optimizer, alone or with an "
            "lr_scheduler of interval 'step'"
        )
    return configured["optimizer"], schedule["scheduler"]


def _loop(work: Work, compiled: Sequence[str]) -> Trained:
    """A hand-written loop, the submodules ``compiled`` replaced by ``torch.compile`` of them; before they are sharded,
    each block compiled in place."""
    module = placed(work.module, work.device)
    sharded = distributed.is_initialized() and work.sharded
    blocks = work.blocks() if sharded else []
    compiled = blocks if compiled and sharded else compiled
    functions = [module.get_submodule(path).forward for path in compiled]
    for path in compiled:
        network: Any = module.get_submodule(path)
        if sharded:
            network.compile(backend=work.backend)
        else:
            network = torch.compile(network, backend=work.backend)
            module.set_submodule(path, network)
    wrapped = wrap(work, module, blocks) if distributed.is_initialized() else None
    loop = PeerLoop(work, *optimizer_and_schedule(module))
    loop.wrapped = wrapped
    loop.train_on(work.loader())
    return loop, functions


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


def loop_eager(work: Work) -> Trained:
    """A hand-written loop."""
    return _loop(work, ())


def loop_compile(work: Work) -> Trained:
    """The same with ``network = torch.compile(network)`` for what the task declares as its network."""
    children = [name for name, child in work.module.named_children() if any(True for _ in child.parameters())]
    return _loop(work, work.config.task.declare().whole or children)


class Measured(L.Callback):
    """Calls the telemetry where our own callback does, and nothing else."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def batch_begins(self, batch: Any) -> None:
        """A batch is on the device."""
        self.telemetry.batch_start()

    def batch_ends(self, loss: Tensor | None, batch: Any) -> None:
        """It is through."""
        self.telemetry.batch_end(loss, batch)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self.telemetry.start(LightningLoop(trainer))

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch is on the device."""
        self.telemetry.batch_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is through."""
        self.telemetry.batch_end(outputs["loss"], batch)

    def on_train_end(self, *_: Any) -> None:
        """Read what is still on its way."""
        self.telemetry.finish()


def lightning_compile(work: Work) -> Trained:
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
        enable_checkpointing=False,
        callbacks=[Measured(work.telemetry)],
        default_root_dir=work.directory,
    )
    step = work.module.training_step
    compiled: Any = torch.compile(work.module, backend=work.backend)
    trainer.fit(compiled, datamodule=work.data)
    return LightningLoop(trainer), [step]


class TrainingStep(nn.Module):
    """``training_step`` as a forward, which is what accelerate puts under autocast and, without blocks, compiles."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        loss: Any = self.module.training_step(batch, 0)
        return loss


class AcceleratedLoop(PeerLoop):
    """The same with accelerate's forward, which enters autocast itself, its backward and its clipping."""

    accelerator: Any

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_gradients(self, largest: float) -> None:
        self.accelerator.clip_grad_norm_(self.module.parameters(), largest)


def accelerate_regional(work: Work) -> Trained:
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
    loop = AcceleratedLoop(work, optimizer, schedule)
    loop.wrapped, loop.accelerator = model, accelerator
    loop.train_on(loader)
    # Wrappers that torch.compile put around repeated blocks; where none repeat, around the whole.
    containers = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    blocks = [block for container in containers for block in container if "_orig_mod" in block._modules]
    wrappers: list[Any] = [*blocks] or [model]
    return loop, [wrapper._orig_mod.forward for wrapper in wrappers]


ARMS: dict[str, Callable[[Work], Trained]] = {
    "loop_eager": loop_eager,
    "loop_compile": loop_compile,
    "lightning_compile": lightning_compile,
    "accelerate_regional": accelerate_regional,
}
"""By the names of ``scripts.benchmark_peers.PEERS``."""
