"""The loops of peers: hand-written, hand-written with its whole step in a CUDA graph, and accelerate's."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from strategies.loop_protocol import MicroBatch, RunMicroBatch
from strategies.regions import expand_blocks, find_containers
from tasks.resumable_data import ResumableDataModule
from trainer.build import device_of, resolve_precision
from trainer.loops.lightning import LightningLoop
from trainer.loops.plain import PlainLoop
from trainer.settings import Config
from trainer.telemetry.telemetry import Telemetry

STEPS_BEFORE_CAPTURE, OF_SEVERAL = 3, 11
"""As torch's notes have it: state of the optimizer, workspaces of kernels; DDP's own work in its first steps."""


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
        containers = self.config.task.declare().blocks or find_containers(self.module)
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
        loader = self.data.train_dataloader()
        self.data.trainer = None
        return loader


class PeerLoop(PlainLoop):
    """A loop without Lightning, as people write it; ``fit`` is measured as our own runs are."""

    wrapped: nn.Module | None = None
    """The training step within what several processes train together by."""
    replays = 0
    """Steps that a CUDA graph has taken."""

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
        self.shards: list[tuple[Any, nn.Parameter]] = []
        if distributed.is_initialized():
            self.world_size, self.is_first_process = distributed.get_world_size(), distributed.get_rank() == 0

    def step_local_shards(self) -> None:
        """Let the optimizer step what this process holds of each parameter: of a DTensor, a fused optimizer resolves
        each step anew, which takes many seconds where a learning rate changes."""
        for group in self.optimizers[0].param_groups:
            for index, parameter in enumerate(group["params"]):
                local = nn.Parameter(parameter.to_local().detach())
                self.shards.append((parameter, local))
                group["params"][index] = local

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for parameter, local in self.shards:
            if parameter.grad is not None:
                local.grad, parameter.grad = parameter.grad.to_local(), None

    def clip_gradients(self, largest: float) -> None:
        if not self.shards:
            super().clip_gradients(largest)
            return
        gradients = [local.grad for _, local in self.shards if local.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        distributed.all_reduce(squares)
        torch._foreach_mul_(gradients, (largest / (squares.sqrt() + 1e-6)).clamp(max=1.0))

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


def captured_steps(loop: PeerLoop) -> RunMicroBatch:
    """Whole steps as replays of one CUDA graph, as torch's notes on CUDA graphs write them. The first ones run, and
    compile, on a side stream; then comes the capture; then each batch is copied to where the graph reads it.

    The optimizer keeps its count and learning rate on the device. https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    optimizer, side, graph = loop.optimizers[0], torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for group in optimizer.param_groups:
        group.update(capturable=True, lr=torch.tensor(float(group["lr"]), device=loop.device))
    before = OF_SEVERAL if distributed.is_initialized() else STEPS_BEFORE_CAPTURE
    seen: list[Any] = []
    loss: Tensor | None = None

    def run(micro: MicroBatch) -> dict[str, Any]:
        nonlocal loss
        if micro.index < before:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outputs = micro.run(micro.batch)
            torch.cuda.current_stream().wait_stream(side)
            return outputs
        leaves, form = pytree.tree_flatten(micro.batch)
        if loss is None:
            seen.extend(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            optimizer.zero_grad()
            # thread_local: the data loader's pinning thread may call CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = micro.forward_backward(pytree.tree_unflatten(seen, form))["loss"]
                micro.optimize({})
            micro.uncount()  # what is captured does not run
            assert loss is not None
        for kept, leaf in zip(seen, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue  # counts for the meter, which no step reads
            if kept.shape != leaf.shape:
                raise ValueError("run.peer=loop_captured takes batches of one shape: task.data.pad_to= pads to one")
            kept.copy_(leaf)
        graph.replay()
        loop.replays += 1
        micro.count(whole=True)
        return {"loss": loss.clone()}

    return run


class Measured(L.Callback):
    """Calls the telemetry where our own callback does, and nothing else."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def batch_begins(self, batch: Any) -> None:
        self.telemetry.batch_start()

    def batch_ends(self, loss: Tensor | None, batch: Any) -> None:
        self.telemetry.batch_end(loss, batch)

    def evaluation_begins(self, batch: Any) -> None:
        """Evaluations are not measured."""

    def evaluation_ends(self) -> None: ...

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.telemetry.start(LightningLoop(trainer))

    def on_train_batch_start(self, *_: Any) -> None:
        self.telemetry.batch_start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.telemetry.batch_end(outputs["loss"], batch)

    def on_train_end(self, *_: Any) -> None:
        self.telemetry.finish()


class TrainingStep(nn.Module):
    """``training_step`` as a forward, which is what accelerate puts under autocast and, without blocks, compiles."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return self.module.training_step(batch, 0)  # type: ignore[return-value]


class AcceleratedLoop(PeerLoop):
    """The same with accelerate's forward, which enters autocast itself, its backward and its clipping."""

    accelerator: Any

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_gradients(self, largest: float) -> None:
        self.accelerator.clip_grad_norm_(self.module.parameters(), largest)
