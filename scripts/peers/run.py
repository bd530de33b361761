"""One run of a peer, from configuration to record: the counterpart of ``trainer.run`` for what is not ours.

Every peer trains our task's module on our task's data under our telemetry.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from scripts.peers.cell import PEERS, mark
from strategies.credentials import hidden
from strategies.errors import one_line
from trainer.build import batch_counter, device_of, note_machine, precision_arguments, resolve_precision
from trainer.callback import fill_in
from trainer.console import ERROR_LOG
from trainer.process import Interrupted, StopRequest, process_settings
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry import hardware
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

TORCH = Path(torch.__file__).parent

Trained = tuple[Any, Sequence[Any]]
"""The trainer, and the functions that were handed to the compiler."""


class NotCompiled(RuntimeError):
    """A peer that compiles has compiled nothing."""


def run(name: str, config: Config, *, run_dir: Path, command: list[str], backend: str) -> RunRecord:
    """Train ``config.task`` as the peer ``name`` does and leave a record in ``run_dir``, however it ends."""
    record = new_record(config, command)
    mark(record, name, backend=backend)
    record.save(run_dir)
    try:
        with process_settings(config.trainer), StopRequest(print):
            _train(name, config, record, run_dir, backend)
        record.status = "finished"
    except Interrupted as interrupted:
        record.status, record.signal, record.reason = "interrupted", interrupted.signum, str(interrupted)
    except Exception as error:
        record.status, record.reason = "failed", one_line(error)
        (run_dir / ERROR_LOG).write_text(hidden(traceback.format_exc()), encoding="utf-8")
    finally:
        record.total_seconds = hardware.process_age_seconds()
        record.save(run_dir)
    return record


def _train(name: str, config: Config, record: RunRecord, run_dir: Path, backend: str) -> None:
    """Seed and build in the order of our own runs, so that weights and batches are theirs; train; fill in the record.

    Raises NotCompiled.
    """
    telemetry = Telemetry(
        count=batch_counter(config.task, config.task.training_flops),
        warmup_steps=config.trainer.warmup_steps,
        log_every_n_steps=config.trainer.log_every_n_steps,
        measure_peak=config.trainer.measure_peak,
    )
    L.seed_everything(config.seed, verbose=False)
    data = config.task.build_data(seed=config.seed)
    module = config.task.build_module(max_steps=config.trainer.max_steps)
    work = Work(config=config, module=module, data=data, telemetry=telemetry, directory=run_dir, backend=backend)
    telemetry.compiler.start()
    try:
        trainer, functions = ARMS[name](work)
    finally:
        telemetry.compiler.stop()
    fill_in(record, trainer, telemetry, None, together=False)
    note_machine(record, trainer)
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
        return device_of(self.config.trainer)

    def loader(self) -> Any:
        """The training batches, still on the host."""
        self.data.prepare_data()
        self.data.setup("fit")
        return self.data.train_dataloader()


class Fetching:
    """The two moments between which a loop waits for a batch; the telemetry hooks into them."""

    def _on_before_fetch(self) -> None: ...

    def _on_after_fetch(self) -> None: ...


class LoopTrainer:
    """A loop without Lightning, as people write it, with what telemetry and record ask of Lightning's Trainer."""

    is_global_zero = True
    world_size = 1

    def __init__(self, work: Work) -> None:
        self.strategy = SimpleNamespace(root_device=work.device)
        self.precision = resolve_precision(work.config.trainer)
        self.default_root_dir = work.directory
        self.fetching = Fetching()
        self.fit_loop = SimpleNamespace(epoch_loop=self.fetching, batch_idx=0)
        self.current_epoch = self.global_step = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self._work = work

    def fit(
        self,
        loss_of: Callable[[Any], Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loader: Iterable[Any],
        *,
        backward: Callable[[Tensor], None] = torch.autograd.backward,
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
    ) -> None:
        """Take the configured steps on batches of ``loader``, measured as those of our own runs are."""
        trainer: Any = self
        settings, telemetry, data = self._work.config.trainer, self._work.telemetry, self._work.data
        parameters, self.optimizers = list(self._work.module.parameters()), [optimizer]
        telemetry.start(trainer, TensorBoardPages(None))
        for fetched in itertools.islice(self._batches(loader), settings.max_steps):
            batch = data.transfer_batch_to_device(fetched, self._work.device, 0)
            telemetry.batch_start()
            optimizer.zero_grad()
            loss = loss_of(batch)
            backward(loss)
            if settings.gradient_clip_val is not None:
                clip(parameters, settings.gradient_clip_val)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            self.global_step += 1
            telemetry.batch_end(loss.detach(), batch)
        telemetry.finish()

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Epoch after epoch, in the order that Lightning would have. Raises ValueError for a loader without batches."""
        for epoch in itertools.count():
            self.current_epoch = epoch
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                    set_epoch(epoch)
            batches, count = iter(loader), 0
            while True:
                self.fetching._on_before_fetch()
                batch = next(batches, None)
                self.fetching._on_after_fetch()
                if batch is None:
                    break
                self.fit_loop.batch_idx = count
                count += 1
                yield batch
            if not count:
                raise ValueError("the training loader has no batches")


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
    """A hand-written loop, the submodules ``compiled`` replaced by ``torch.compile`` of them."""
    trainer = LoopTrainer(work)
    module = placed(work.module, work.device)
    functions = [module.get_submodule(path).forward for path in compiled]
    for path in compiled:
        network: Any = torch.compile(module.get_submodule(path), backend=work.backend)
        module.set_submodule(path, network)
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if trainer.precision == "bf16-mixed":
        autocast = torch.autocast(work.device.type, torch.bfloat16)

    def loss_of(batch: Any) -> Tensor:
        with autocast:
            loss: Any = module.training_step(batch, 0)
        return loss

    trainer.fit(loss_of, *optimizer_and_schedule(module), work.loader())
    return trainer, functions


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
        self._telemetry = telemetry

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self._telemetry.start(trainer, TensorBoardPages(None))

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch is on the device."""
        self._telemetry.batch_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is through."""
        self._telemetry.batch_end(outputs["loss"], batch)

    def on_train_end(self, *_: Any) -> None:
        """Read what is still on its way."""
        self._telemetry.finish()


def lightning_compile(work: Work) -> Trained:
    """Lightning as its documentation compiles: of a compiled module, the Trainer compiles ``training_step`` whole.
    https://lightning.ai/docs/pytorch/stable/advanced/compile.html"""
    settings = work.config.trainer
    trainer = L.Trainer(
        accelerator=settings.accelerator,
        devices=1,
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
    return trainer, [step]


class TrainingStep(nn.Module):
    """``training_step`` as a forward, which is what accelerate puts under autocast and, without blocks, compiles."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        loss: Any = self.module.training_step(batch, 0)
        return loss


def accelerate_regional(work: Work) -> Trained:
    """Regional compilation as accelerate has it: of a module built anew, the blocks and what is between them.
    https://huggingface.co/docs/accelerate/usage_guides/compilation"""
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    trainer = LoopTrainer(work)
    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision="bf16" if trainer.precision == "bf16-mixed" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend=work.backend, use_regional_compilation=True),
    )
    module = placed(work.module, work.device)
    optimizer, schedule = optimizer_and_schedule(module)
    model: Any
    model, optimizer, loader = accelerator.prepare(TrainingStep(module), optimizer, work.loader())
    schedule = None if schedule is None else accelerator.prepare(schedule)
    clip = accelerator.clip_grad_norm_
    trainer.fit(model, optimizer, schedule, loader, backward=accelerator.backward, clip=clip)
    # Wrappers that torch.compile put around repeated blocks; where none repeat, around the whole.
    containers = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    blocks = [block for container in containers for block in container if "_orig_mod" in block._modules]
    wrappers: list[Any] = [*blocks] or [model]
    return trainer, [wrapper._orig_mod.forward for wrapper in wrappers]


ARMS: dict[str, Callable[[Work], Trained]] = {
    "loop_eager": loop_eager,
    "loop_compile": loop_compile,
    "lightning_compile": lightning_compile,
    "accelerate_regional": accelerate_regional,
}
"""By the names of ``scripts.peers.cell.PEERS``."""
