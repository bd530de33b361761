"""A plain PyTorch loop behind the protocol ``strategies.loop_protocol.Loop``: one process, nothing logged.

It is what people write themselves: batches, loss, backward, clipping, optimizer, schedule. Strategies, guards and
capture run in it as in Lightning's, which shows that they know nothing of Lightning. ``trainer.loops.own_loop`` is its
door for scripts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from strategies.loop_protocol import LogCall, RunMicroBatch
from trainer.loops.lightning_internals import replace
from trainer.loops.ranks import RankReductions

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = TypeVar("Value")
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What the forward and the loss are cast to, by Lightning's name for the precision."""


class SingleProcessLoop(RankReductions):
    """Nobody has to be asked; see ``Loop`` for what the members mean."""

    cuda_graphs = False
    manual = False
    world_size = 1
    is_first_process = True
    capture_warmup_steps = 0
    stream: torch.cuda.Stream | None = None
    _fetching: tuple[Callable[[], Any], Callable[[], Any]] = (lambda: None, lambda: None)

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        return tensor

    def collectives_obstacle(self) -> str | None:
        return None

    def constants(self) -> Hashable:
        return ()  # nothing of it changes within a training

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        return replace(self, "_fetching", (before, after))

    def fetched(self, batches: Iterator[Value]) -> Iterator[Value]:
        """``batches``, each of which is fetched between what ``around_fetch`` was given."""
        while True:
            before, after = self._fetching
            before()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                after()
            yield batch

    def unreadable_types(self) -> Mapping[type, str]:
        return {}

    def recording_logs(self) -> contextlib.AbstractContextManager[list[tuple[LogCall, Any]]]:
        return contextlib.nullcontext([])

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        """Nothing was kept."""


class PlainLoop(SingleProcessLoop):
    """Trains ``module`` with ``optimizers``; see ``Loop`` for what the members mean.

    The module is on its device. ``loss(batch)`` is a batch's loss, by default that of the module's
    ``training_step(batch, batch_index)``. ``micro_batches`` make an optimizer step, after which ``schedule`` steps.
    ``clip`` is the largest norm of the gradients; None = no clipping. A mixed ``precision`` enters autocast, anything
    else is left to the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *optimizers: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor] | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        micro_batches: int = 1,
        clip: float | None = None,
        precision: str = "32-true",
        scaler: torch.amp.GradScaler | None = None,
        max_steps: int | None = None,
        directory: str = ".",
        log_every_n_steps: int = 50,
        writer: SummaryWriter | None = None,
    ) -> None:
        self.module, self.optimizers, self.micro_batches = module, optimizers, micro_batches
        self.schedulers = () if schedule is None else (schedule,)
        self.device = next((one.device for one in module.parameters()), torch.device("cpu"))
        self.precision, self.steps_planned, self._clip, self.scaler = precision, max_steps, clip, scaler
        self.directory, self.log_every_n_steps, self.writer = directory, log_every_n_steps, writer
        self.metrics: dict[str, Tensor] = {}
        self.step_function = loss
        self._progress = SimpleNamespace(steps=0, batches=0)
        self._epoch = self._began = 0
        self._wrapped: RunMicroBatch | None = None

    def epoch_begins(self, epoch: int) -> None:
        """Batches are counted anew."""
        self._epoch, self._began = epoch, self._progress.batches

    def train_on_batch(self, batch: Any) -> Tensor | None:
        """Run ``batch``, or have it run, see ``wrap_step``; returns its loss, detached and divided by
        ``micro_batches``."""
        micro = PlainMicroBatch(self, batch, self._progress.batches)
        outputs = micro.run(batch) if self._wrapped is None else self._wrapped(micro)
        loss: Tensor | None = outputs.get("loss")
        self._progress.batches += 1
        if micro.ends:
            for schedule in self.schedulers:
                schedule.step()
        return loss

    # ---- what a loop of one's own may do otherwise -----------------------------------------------------------------

    stepped = False
    """Whether an optimizer has stepped in the batch under way, where a loop steps them itself."""

    def batch_begins(self) -> None:
        """A batch is going to be trained on, by this loop or one of the user's."""

    def batch_ends(self) -> None:
        """It is through."""

    def release(self) -> None:
        """Undo what was put on module and optimizers."""

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip_gradients(self, largest: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), largest)

    # ---- facts ----------------------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        return int(self._progress.steps)

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._progress.batches - self._began

    @property
    def validates(self) -> bool:
        return hasattr(self.module, "validation_step")

    def logs(self, name: str) -> bool:
        return False

    def log_figures(self, values: Mapping[str, float], step: int) -> None:
        """There is no logger."""

    # ---- pieces of a step ------------------------------------------------------------------------------------------

    def arguments(self, batch: Any, index: int) -> dict[str, Any]:
        """Of what computes a batch's loss."""
        return {"batch": batch, "batch_idx": index} if self.step_function is None else {"batch": batch}

    def forward_loss(self, arguments: Mapping[str, Any]) -> Tensor | None:
        step: Any = self.module.training_step if self.step_function is None else self.step_function
        with self.autocast():
            returned = step(*arguments.values())
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        return None if loss is None else loss / self.micro_batches

    def optimize(self) -> None:
        optimizer, scaler = self.optimizers[0], self.scaler
        if self._clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self.clip_gradients(self._clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self._progress.steps += 1

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What forward and loss run in."""
        if self.precision not in AUTOCAST:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, AUTOCAST[self.precision])

    # ---- standing around the loop's own steps ----------------------------------------------------------------------

    def capture_obstacles(self) -> Iterable[str]:
        return ()

    def wrap_step(self, run: RunMicroBatch) -> Callable[[], None]:
        return replace(self, "_wrapped", run)

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None  # it writes no checkpoint


class PlainMicroBatch:
    """One batch of a ``PlainLoop``; see ``MicroBatch``."""

    def __init__(self, loop: PlainLoop, batch: Any, index: int) -> None:
        self._loop, self.batch, self.index = loop, batch, index
        self.arguments: Mapping[str, Any] = loop.arguments(batch, index)
        self.begins = index % loop.micro_batches == 0
        self.ends = (index + 1) % loop.micro_batches == 0
        self._steps = loop.steps_done

    def run(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward_backward(batch)
        if self.ends:
            self._loop.optimize()
        return outputs

    def forward_backward(self, batch: Any) -> dict[str, Any]:
        if self.begins:
            self._loop.optimizers[0].zero_grad()
        arguments = {**self.arguments, "batch": batch}
        loss = self._loop.forward_loss(arguments)
        if loss is not None:
            self._loop.backward(loss)
        return {"loss": None if loss is None else loss.detach()}

    def optimize(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        self._loop.optimize()
        return dict(outputs)

    def count(self, *, whole: bool) -> None:
        if whole:
            self._loop._progress.steps += 1

    def uncount(self) -> None:
        self._loop._progress.steps = self._steps
