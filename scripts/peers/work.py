"""Work: what a peer is given to train, the task's own module and data, and who measures it as our own runs are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, distributed, nn

from strategies.regions import expand_blocks, find_containers
from tasks.resumable_data import ResumableDataModule
from trainer.build import device_of, resolve_precision
from trainer.loops.plain import SingleProcessLoop
from trainer.settings import Config
from trainer.telemetry.telemetry import Telemetry


class Work(SingleProcessLoop):
    """A loop by hand takes its batches from it, and says when a step is done:

        for batch in work.batches():
            ...
            work.stepped(loss)

    It is as much of a ``strategies.loop_protocol.Loop`` as the telemetry reads.
    """

    metrics: dict[str, Tensor] = {}
    optimizers: tuple[Any, ...] = ()
    steps_done = 0
    position = (0, 0)

    def __init__(
        self,
        config: Config,
        module: L.LightningModule,
        data: L.LightningDataModule,
        telemetry: Telemetry,
        directory: Path,
        backend: str,
    ) -> None:
        settings, device = config.trainer, device_of(config.trainer)
        self.config, self.module, self.data, self.telemetry = config, module, data, telemetry
        self.directory, self.log_every_n_steps = str(directory), settings.log_every_n_steps
        self.precision, self.clip = resolve_precision(settings), settings.gradient_clip_val
        self.backend = backend
        """Of ``torch.compile``."""
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        """The one that Lightning would take."""
        self.sharded = settings.strategy == "fsdp2"
        """Whether several processes train by FSDP2; else by DDP."""
        if distributed.is_initialized():
            self.world_size, self.is_first_process = distributed.get_world_size(), distributed.get_rank() == 0

    def placed(self) -> L.LightningModule:
        """The module with its weights, on its device."""
        return placed(self.module, self.device)

    def networks(self) -> Sequence[str]:
        """Paths of what the task declares as its network, or of all children with parameters."""
        children = [name for name, child in self.module.named_children() if any(True for _ in child.parameters())]
        return self.config.task.declare().whole or children

    def blocks(self) -> list[str]:
        """Paths of the blocks that repeat."""
        return expand_blocks(self.module, self.config.task.declare().blocks or find_containers(self.module))

    def optimizer_and_schedule(self) -> tuple[Any, Any]:
        """What ``configure_optimizers`` returns, taken apart. Raises ValueError for what a loop by hand has no place
        for."""
        configured: Any = self.module.configure_optimizers()
        if isinstance(configured, torch.optim.Optimizer):
            configured = {"optimizer": configured, "lr_scheduler": {"interval": "step", "scheduler": None}}
        schedule = configured.get("lr_scheduler") if isinstance(configured, dict) else None
        if not isinstance(schedule, dict) or schedule.get("interval") != "step":
            raise ValueError(
                f"{type(self.module).__name__}.configure_optimizers: a hand-written loop takes one optimizer, alone or "
                "with an lr_scheduler of interval 'step'"
            )
        self.optimizers = (configured["optimizer"],)
        return configured["optimizer"], schedule["scheduler"]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision != "bf16-mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def loader(self) -> Any:
        """This process's training batches, still on the host. Raises ValueError for data that cannot be split so."""
        if distributed.is_initialized():
            if not isinstance(self.data, ResumableDataModule):
                raise ValueError(f"{type(self.data).__name__} does not split its batches over processes by itself")
            trainer: Any = SimpleNamespace(
                world_size=self.world_size, global_rank=distributed.get_rank(), fit_loop=None
            )
            self.data.trainer = trainer
        self.data.prepare_data()
        self.data.setup("fit")
        loader = self.data.train_dataloader()
        self.data.trainer = None
        return loader

    # ---- what is measured ----------------------------------------------------------------------------------------

    def batches(self, loader: Any = None) -> Iterator[Any]:
        """Batches on the device, one for each step that the configuration asks for, epoch after epoch; by default of
        ``self.loader()``. Raises ValueError for a loader without any."""
        loader = self.loader() if loader is None else loader
        self.begin()
        for epoch in itertools.count():
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                    set_epoch(epoch)
            before = self.steps_done
            for batch in self.epoch(loader, epoch):
                yield batch
                if self.steps_done == self.config.trainer.max_steps:
                    self.telemetry.finish()
                    return
            if self.steps_done == before:
                raise ValueError("the training loader has no batches")

    def begin(self) -> None:
        """Model and optimizer are on their device."""
        self.telemetry.start(self)  # type: ignore[arg-type]  # see the class

    def epoch(self, loader: Any, number: int) -> Iterator[Any]:
        """The batches of one epoch, on the device, each with a step of its own."""
        for index, batch in enumerate(self.fetched(iter(loader))):
            self.position = number, index
            self._batch = self.data.transfer_batch_to_device(batch, self.device, 0)
            self.telemetry.batch_start()
            yield self._batch

    def stepped(self, loss: Tensor) -> None:
        """The batch's optimizer step is done; the next batch is asked for."""
        self.steps_done += 1
        self.telemetry.batch_end(loss.detach(), self._batch)


def placed(module: L.LightningModule, device: torch.device) -> L.LightningModule:
    """Give the module its weights and its device, as Lightning does before it asks for optimizers, and let it train."""
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    module.trainer = trainer
    module.configure_model()
    module.trainer = None  # ``self.log`` of a module in a hand-written loop goes nowhere
    return module.to(device).train()


class TrainingStep(nn.Module):
    """``training_step`` as a forward: what DDP, FSDP2 and accelerate are put around."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return self.module.training_step(batch, 0)  # type: ignore[return-value]


def together(work: Work, blocks: Sequence[str]) -> Callable[[Any], Tensor]:
    """The training step of one process; of several under DDP, or sharded by FSDP2, each of ``blocks`` a unit."""
    if not distributed.is_initialized():
        return lambda batch: work.module.training_step(batch, 0)  # type: ignore[return-value]
    step = TrainingStep(work.module)
    if not work.sharded:
        device = [work.device] if work.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(step, device_ids=device, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if work.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for path in blocks:
        fully_shard(work.module.get_submodule(path), mp_policy=policy)
    fully_shard(step, mp_policy=policy)
    return step
