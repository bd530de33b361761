"""Loop: what strategies and guards need from a training loop, whoever wrote it.

Lightning's adapter is ``trainer.loops.lightning``, a plain loop is ``trainer.loops.plain``. Another framework's loop
needs a class with these members and nothing else. Importing this module must stay cheap (no torch).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.utils.tensorboard import SummaryWriter

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of ``log`` within a training step, without its value."""

    name: str
    options: dict[str, Any]


class MicroBatch(Protocol):
    """One micro-batch about to run: training step, zeroing, backward and, where a step ends, clipping and optimizer."""

    batch: Any
    index: int
    arguments: Mapping[str, Any]
    """Of the training step, ``batch`` among them."""
    begins: bool
    """Whether it is the first of its optimizer step: the gradients are zeroed."""
    ends: bool
    """Whether it is the last: the optimizer steps."""

    def run(self, batch: Any) -> dict[str, Any]:
        """All of it, on ``batch``; returns what the loop hands to those who wait for the end of a batch."""

    def forward_backward(self, batch: Any) -> dict[str, Any]:
        """All but clipping and optimizer."""

    def optimize(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Clipping and optimizer, with the gradients that are there; returns ``outputs``, or those of the last of
        further evaluations that the optimizer asks for."""

    def count(self, *, whole: bool) -> None:
        """Count it as done: a replay has executed it (``whole``: with the optimizer) and called no Python."""

    def uncount(self) -> None:
        """It was called in Python, but not executed: take back what the loop has counted since."""


RunMicroBatch = Callable[[MicroBatch], dict[str, Any]]
"""Stands in for the loop's own way to run a micro-batch, which is ``MicroBatch.run`` on its batch."""


class StepHook:
    """One of the things that stand around a step, in the list that ``CompiledTraining`` makes; what it leaves out does
    nothing."""

    def before(self, batch: Any) -> None:
        """A micro-batch is on the device and about to run."""

    def after(self, *, stepped: bool) -> None:
        """It is through, and with it an optimizer step where it ``stepped``."""

    def close(self) -> None:
        """The training is over, finished or broken."""


# ---- what processes agree on -----------------------------------------------------------------------------------------

_groups: dict[str, tuple[object, ProcessGroup]] = {}


def gathered(value: Value) -> list[Value]:
    """``value`` of each process of the group, by rank; all of them call it. No device is waited for."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=host_group())
    return values


def host_group(thread: str = "main") -> ProcessGroup:
    """A gloo group of all processes beside the one that trains, made once for each of those; all processes call it.
    Each ``thread`` that communicates has its own, because the order of two threads differs between processes."""
    from torch import distributed

    world = distributed.group.WORLD
    if thread not in _groups or _groups[thread][0] is not world:
        group: Any = distributed.new_group(backend="gloo", timeout=group_timeout())
        _groups[thread] = world, group
    return _groups[thread][1]


def group_timeout() -> timedelta:
    """How long a collective of the group that trains waits for a process; a new group has torch's default else."""
    from torch import distributed

    world: Any = distributed.group.WORLD
    timeout: timedelta = world._get_backend(world._device_types[-1]).options._timeout
    return timeout


class Loop(Protocol):
    """A training loop, from the beginning of a training to its end."""

    # ---- facts that stay as they are

    device: torch.device
    """Where this process trains."""
    precision: str
    """Lightning's name for the precision: ``32-true``, ``bf16-mixed``, ..."""
    scaler: Any | None
    """The gradient scaler, ``torch.amp.GradScaler``."""
    manual: bool
    """Whether the training step runs backward and optimizers itself."""
    step_function: Callable[..., Any] | None
    """What computes a batch's loss, where that is not the module's ``training_step``."""
    directory: str
    """Where the run writes."""
    log_every_n_steps: int
    """Optimizer steps between two writes of logged figures."""
    world_size: int
    """Processes that train together."""
    is_first_process: bool
    """Whether this process writes and reports."""
    cuda_graphs: bool
    """Whether Inductor replays compiled code from CUDA graphs, so that each step has to be marked."""

    # ---- facts

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """In the loop's order, with their restored state."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """Learning-rate schedulers."""

    @property
    def micro_batches(self) -> int:
        """Batches whose gradients are accumulated for one optimizer step."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, those of earlier runs that it resumed included."""

    @property
    def steps_planned(self) -> int | None:
        """Optimizer steps at the end; None where nobody knows."""

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and index of the batch within it."""

    @property
    def validates(self) -> bool:
        """Whether the module is validated during this training."""

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """What was logged last, by name."""

    @property
    def writer(self) -> SummaryWriter | None:
        """TensorBoard's writer, for figures and pages; None without one, and on all processes but the first."""

    def logs(self, name: str) -> bool:
        """Whether the training itself logs a figure of that name, which ours must not get mixed with."""

    def log_figures(self, values: Mapping[str, float], step: int) -> None:
        """Hand figures to the loggers that are not TensorBoard's."""

    # ---- processes

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any process; every process calls it."""

    def all_ranks(self, flag: bool) -> bool:
        """Whether ``flag`` is true on all processes; every process calls it."""

    def min_over_ranks(self, value: int) -> int:
        """The smallest of the processes' numbers, without waiting for the device; every process calls it."""

    def broadcast(self, value: Value) -> Value:
        """The first process's ``value``; every process calls it."""

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """``tensor`` over all processes, ``sum``, ``mean`` or ``max``; every process calls it."""

    # ---- standing around the loop's own steps

    def collectives_obstacle(self) -> str | None:
        """Why no graph can hold the collectives of a step; None where one can, and for one process."""

    @property
    def capture_warmup_steps(self) -> int:
        """Steps that the processes must have taken together before one is captured."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where DDP has wrapped the module to be captured, and where its steps run: the gradients that DDP waits for
        would else cross streams in every backward. None = wherever."""

    def capture_obstacles(self) -> Iterable[str]:
        """What the loop does on the host in every step, which no CUDA graph repeats."""

    def unreadable_types(self) -> Mapping[type, str]:
        """Types of the loop whose objects a captured step must not read, with the reason."""

    def constants(self) -> Hashable:
        """What a step takes by value from the loop (clipping, accumulation), so that a graph holds for it alone."""

    def wrap_step(self, run: RunMicroBatch) -> Callable[[], None]:
        """Let ``run`` run every micro-batch from now on, the one that has begun included; returns what undoes it. The
        session calls it where steps are captured."""

    def recording_logs(self) -> AbstractContextManager[list[tuple[LogCall, Any]]]:
        """Inside, what the training step logs is not logged but kept in the list."""

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        """Log, in the name of the training step."""

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` each fetch of a batch, from the next epoch on; returns what undoes it."""

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        """Call ``saved`` with the path of each checkpoint once it is written, and now with the one that the training
        was resumed from; returns what undoes it."""
