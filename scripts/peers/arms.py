"""What each of ``scripts.peers`` runs, over our task's module and data and under our telemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from scripts.hand_loop import HandLoop, optimizer_and_schedule, placed
from scripts.peers.loop import LoopTrainer
from trainer.build import device_of, precision_arguments, resolve_precision
from trainer.settings import Config
from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages


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

    def loop_trainer(self) -> LoopTrainer:
        """For a peer without Lightning."""
        return LoopTrainer(self.device, resolve_precision(self.config.trainer), self.directory)

    def loader(self) -> Any:
        """The training batches, still on the host."""
        self.data.prepare_data()
        self.data.setup("fit")
        return self.data.train_dataloader()

    def to_device(self, batch: Any) -> Any:
        """A batch, moved as the task does it."""
        return self.data.transfer_batch_to_device(batch, self.device, 0)


Trained = tuple[Any, Sequence[Any]]
"""The trainer, and the functions that were handed to the compiler."""


def loop_eager(work: Work) -> Trained:
    """A hand-written loop."""
    return _by_hand(work, ())


def loop_compile(work: Work) -> Trained:
    """The same with ``network = torch.compile(network)`` for what the task declares as its network."""
    children = [name for name, child in work.module.named_children() if any(True for _ in child.parameters())]
    return _by_hand(work, work.config.task.declare().whole or children)


def _by_hand(work: Work, compiled: Sequence[str]) -> Trained:
    trainer, settings = work.loop_trainer(), work.config.trainer
    module = placed(work.module, work.device)
    functions = [module.get_submodule(path).forward for path in compiled]
    for path in compiled:
        network: Any = torch.compile(module.get_submodule(path), backend=work.backend)
        module.set_submodule(path, network)
    loop = HandLoop(module, device=work.device, precision=trainer.precision, clip=settings.gradient_clip_val)
    trainer.optimizers = [loop.optimizer]
    trainer.fit(loop.step, work.loader(), work.to_device, max_steps=settings.max_steps, telemetry=work.telemetry)
    return trainer, functions


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

    trainer, settings = work.loop_trainer(), work.config.trainer
    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision="bf16" if trainer.precision == "bf16-mixed" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend=work.backend, use_regional_compilation=True),
    )
    module = placed(work.module, work.device)
    optimizer, schedule = optimizer_and_schedule(module)
    model, optimizer, loader = accelerator.prepare(TrainingStep(module), optimizer, work.loader())
    schedule = None if schedule is None else accelerator.prepare(schedule)
    trainer.optimizers, clip = [optimizer], settings.gradient_clip_val

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch)
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss.detach()

    trainer.fit(step, loader, work.to_device, max_steps=settings.max_steps, telemetry=work.telemetry)
    return trainer, [wrapper._orig_mod.forward for wrapper in compiled_blocks(model)]


def compiled_blocks(model: nn.Module) -> list[Any]:
    """Wrappers that ``torch.compile`` put around repeated blocks; where none repeat, around the whole."""
    containers = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    wrappers = [block for container in containers for block in container if "_orig_mod" in block._modules]
    return wrappers or [model]


ARMS: dict[str, Callable[[Work], Trained]] = {
    "loop_eager": loop_eager,
    "loop_compile": loop_compile,
    "lightning_compile": lightning_compile,
    "accelerate_regional": accelerate_regional,
}
"""By the names of ``scripts.peers.names.PEERS``."""
