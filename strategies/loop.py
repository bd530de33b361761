"""Loop: what strategies and guards need from a training loop, whoever wrote it.

Lightning's adapter is ``trainer.loops.lightning``, a plain loop is ``trainer.loops.plain``. Another framework's loop
needs a class with these members and nothing else. Importing this module must stay cheap (no torch).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.tensorboard import SummaryWriter

Inspect = Callable[["Tensor"], None]
"""Called with the loss between backward and optimizer step, gradients in place, not yet clipped; under manual
optimization after every backward."""

Value = TypeVar("Value")


class SkippedStep(RuntimeError):
    """The training step asked for no backward: there is nothing to run apart on this batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a step is; longer than one batch only under manual optimization."""

    batches: int = 1
    """Training steps until every optimizer has stepped that does so at all within a few of them."""
    steps: int = 1
    """Training steps among them in which ``steps_done`` grew: the steps that training is timed by."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of ``log`` within a training step, without its value."""

    name: str
    options: dict[str, Any]


class Restorable(Protocol):
    """A copy of what a forward may change."""

    @property
    def lost(self) -> str | None:
        """What a step would use up and nobody could put back, on any process, or None. Every process asks."""

    def restore(self) -> None:
        """Put everything back; can be done any number of times."""


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

    def forward(self, batch: Any, index: Any) -> Any:
        """The training step alone; returns what it returned."""

    def optimize(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Clipping and optimizer, with the gradients that are there; returns ``outputs``, or those of the last of
        further evaluations that the optimizer asks for."""

    def count(self, *, whole: bool) -> None:
        """Count it as done: a replay has executed it (``whole``: with the optimizer) and called no Python."""

    def uncount(self) -> None:
        """It was called in Python, but not executed: take back what the loop has counted since."""


RunMicroBatch = Callable[[MicroBatch], dict[str, Any]]
"""Stands in for the loop's own way to run a micro-batch, which is ``MicroBatch.run``."""

Around = Callable[[MicroBatch], AbstractContextManager[dict[str, Any]] | None]
"""Makes what a micro-batch is run in, or None; it may be given the outputs, in its dictionary."""


def gathered(value: Value) -> list[Value]:
    """``value`` of each process of the group, by rank; all of them call it."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


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

    def counters(self) -> list[object]:
        """Objects in whose attributes the loop counts what a step did."""

    # ---- processes

    def anywhere(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any process; every process calls it."""

    def everywhere(self, flag: bool) -> bool:
        """Whether ``flag`` is true on all processes; every process calls it."""

    def least(self, value: int) -> int:
        """The smallest of the processes' numbers, without waiting for the device; every process calls it."""

    def broadcast(self, value: Value) -> Value:
        """The first process's ``value``; every process calls it."""

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """``tensor`` over all processes, ``sum``, ``mean`` or ``max``; every process calls it."""

    # ---- single steps on a batch at hand, apart from the training

    def why_not_apart(self) -> str | None:
        """Why no step can be run apart from the training; None when one can."""

    @property
    def span(self) -> Span:
        """How long a step is; under manual optimization known after the first ``step``."""

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, nothing is logged, profiled or seen by callbacks."""

    def snapshot(self, batch: Any) -> Restorable:
        """Copy what the forward of a training step on ``batch`` may change."""

    def train(self, batch: Any, inspect: Inspect | None = None, *, together: bool = True) -> Tensor:
        """Forward and backward; returns the loss, detached, divided by ``micro_batches``.

        ``together=False`` leaves the gradients of the processes apart, so that one of them may fail alone. Under manual
        optimization it is a whole step, whose parts cannot be separated. Raises SkippedStep.
        """

    def step(self, batch: Any, inspect: Inspect | None = None) -> Tensor:
        """A whole optimizer step on one batch, clipping and scaling included; returns the loss, detached.

        Under manual optimization it takes as many training steps as ``span`` says, and returns the numbers that they
        returned, ``(numbers,)``. Raises SkippedStep.
        """

    def forward_loss(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """The training step alone, on arguments as ``around_training_step`` gives them; its loss as in ``train``."""

    def evaluate(self, batch: Any, step: str = "validation_step") -> Any:
        """What ``validation_step``, or the forward of ``training_step``, returns on ``batch`` in evaluation mode."""

    # ---- standing around the loop's own steps

    def why_not_capture_together(self) -> str | None:
        """Why no graph can hold the collectives of a step; None where one can, and for one process."""

    @property
    def capture_warmup_steps(self) -> int:
        """Steps that the processes must have taken together before one is captured."""

    def why_not_capture(self) -> Iterable[str]:
        """What the loop does on the host in every step, which no CUDA graph repeats."""

    def unreadable(self) -> Mapping[type, str]:
        """Types of the loop whose objects a captured step must not read, with the reason."""

    def constants(self) -> Hashable:
        """What a step takes by value from the loop (clipping, accumulation), so that a graph holds for it alone."""

    def take_over(self, run: RunMicroBatch) -> Callable[[], None]:
        """Let ``run`` run every micro-batch from now on; returns what undoes it. Whoever takes over later stands
        outside, and has to undo it first."""

    def around_micro_batches(self, around: Around) -> Callable[[], None]:
        """Run every micro-batch from now on in what ``around`` makes; returns what undoes it. Unlike ``take_over`` it
        leaves the loop its own order of forward, backward and optimizer, which may lie far apart."""

    def recording_logs(self) -> AbstractContextManager[list[tuple[LogCall, Any]]]:
        """Inside, what the training step logs is not logged but kept in the list."""

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        """Log, in the name of the training step."""

    def around_training_step(
        self, before: Callable[[Mapping[str, Any]], None], after: Callable[[Tensor | None], None]
    ) -> AbstractContextManager[None]:
        """Inside, each training step of the loop calls ``before`` with its arguments and ``after`` with its loss."""

    def clip_with(self, clip: Callable[[torch.optim.Optimizer, float], bool]) -> Callable[[], None]:
        """Ask ``clip`` first, with optimizer and largest norm, wherever the loop itself would clip by norm: True where
        it has seen to it. Returns what undoes it."""

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` each fetch of a batch, from the next epoch on; returns what undoes it."""

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        """Call ``saved`` with the path of each checkpoint once it is written, and now with the one that the training
        was resumed from; returns what undoes it."""
