"""A plain PyTorch loop behind the protocol ``strategies.loop.Loop``: one process, one optimizer, nothing logged.

It is what people write themselves: batches, ``training_step``, backward, clipping, optimizer, schedule. Strategies,
guards and capture run in it as in Lightning's, which shows that they know nothing of Lightning.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from strategies.loop import RunMicroBatch
from trainer.loops.private import replace
from trainer.loops.processes import OneProcess


class PlainLoop(OneProcess):
    """Trains ``module`` with ``optimizer``; see ``Loop`` for what the members mean.

    The module is on its device, with ``training_step(batch, batch_index)`` that returns the loss, and
    ``validation_step`` where it is to be validated. ``micro_batches`` make an optimizer step, after which ``schedule``
    steps. ``clip`` is the largest norm of the gradients; None = no clipping. ``precision="bf16-mixed"`` enters
    autocast, anything else is left to the module.
    """

    scaler = None
    writer = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        micro_batches: int = 1,
        clip: float | None = None,
        precision: str = "32-true",
        max_steps: int | None = None,
        directory: str = ".",
        log_every_n_steps: int = 50,
    ) -> None:
        self.module, self.optimizers, self.micro_batches = module, (optimizer,), micro_batches
        self.schedulers = () if schedule is None else (schedule,)
        self.device = next(module.parameters()).device
        self.precision, self.steps_planned, self._clip = precision, max_steps, clip
        self.directory, self.log_every_n_steps = directory, log_every_n_steps
        self.metrics: dict[str, Tensor] = {}
        self._progress = SimpleNamespace(steps=0, batches=0)
        self._epoch = self._began = 0
        self._run: RunMicroBatch = lambda micro: micro.run(micro.batch)

    def fit(self, loader: Iterable[Any], training: Any = None) -> Iterator[Tensor | None]:
        """Train on ``loader``, epoch after epoch up to ``max_steps``, one epoch without; yields the loss of each batch,
        detached and divided by ``micro_batches``. Raises ValueError for a loader without batches.

        ``training``, for instance a ``CompiledTraining``, hears of each: ``batch_begins``, ``batch_ends``.
        """
        self.module.train()
        for self._epoch in itertools.count():
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                    set_epoch(self._epoch)
            batches, self._began = self.fetched(iter(loader)), self._progress.batches
            while self.steps_planned is None or self.steps_done < self.steps_planned:
                batch = next(batches, None)
                if batch is None:
                    break
                batch = self.to_device(batch)
                if training is not None:
                    training.batch_begins(batch)
                yield self._fit_batch(batch, training)
            else:
                return
            if self._progress.batches == self._began:
                raise ValueError("the training loader has no batches")
            if self.steps_planned is None:
                return

    def _fit_batch(self, batch: Any, training: Any) -> Tensor | None:
        micro = PlainMicroBatch(self, batch, self._progress.batches)
        loss: Tensor | None = self._run(micro).get("loss")
        self._progress.batches += 1
        if micro.ends:
            for schedule in self.schedulers:
                schedule.step()
        if training is not None:
            training.batch_ends(loss, batch)
        return loss

    # ---- what a loop of one's own may do otherwise -----------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        return batch

    def backward(self, loss: Tensor) -> None:
        loss.backward()

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

    def forward_loss(self, arguments: Mapping[str, Any]) -> Tensor | None:
        with self.autocast():
            returned = self.module.training_step(*arguments.values())  # type: ignore[operator]
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        return None if loss is None else loss / self.micro_batches

    def optimize(self) -> None:
        if self._clip is not None:
            self.clip_gradients(self._clip)
        self.optimizers[0].step()
        self._progress.steps += 1

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What forward and loss run in."""
        if self.precision != "bf16-mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # ---- standing around the loop's own steps ----------------------------------------------------------------------

    def why_not_capture(self) -> Iterable[str]:
        return ()

    def take_over(self, run: RunMicroBatch) -> Callable[[], None]:
        before = self._run
        return replace(self, "_run", lambda micro: run(PlainMicroBatch(self, micro.batch, micro.index, before)))

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None  # it writes no checkpoint


class PlainMicroBatch:
    """One batch of a ``PlainLoop``; see ``MicroBatch``."""

    def __init__(self, loop: PlainLoop, batch: Any, index: int, run: RunMicroBatch | None = None) -> None:
        self._loop, self.batch, self.index, self._original = loop, batch, index, run
        self.arguments: Mapping[str, Any] = {"batch": batch, "batch_idx": index}
        self.begins = index % loop.micro_batches == 0
        self.ends = (index + 1) % loop.micro_batches == 0
        self._steps = loop.steps_done

    def run(self, batch: Any) -> dict[str, Any]:
        if self._original is not None:
            return self._original(PlainMicroBatch(self._loop, batch, self.index))
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
