"""Lightning's private pieces: what stands in for some, and the steps made of them.

Lightning is pinned below its next minor version, and a user may install another one all the same. Then nothing ends:
what needs names that it may have renamed is left out, with that reason (``untried``).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import model_helpers
from torch import Tensor

from strategies.loop import Inspect, SkippedStep, Span


def kinds(*classes: Any) -> tuple[Any, ...]:
    """Lightning's ``classes`` and those of the same names in ``pytorch_lightning``, a copy of ``lightning.pytorch``.

    Users import one or the other, and an object of one is not an instance of the other's class.
    """
    modules = [sys.modules.get(one.__module__.replace("lightning.pytorch", "pytorch_lightning")) for one in classes]
    return (*classes, *(getattr(module, one.__name__) for module, one in zip(modules, classes, strict=True) if module))


def package_of(trainer: L.Trainer) -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``, of which ``trainer`` is one."""
    kind = next(one for one in kinds(L.Trainer) if isinstance(trainer, one))
    return sys.modules[kind.__module__.removesuffix(".trainer.trainer")]


def untried(trainer: L.Trainer) -> str | None:
    """Why no step is run apart from the training in this version of Lightning; None where it was tried."""
    version = package_of(trainer).__version__
    if version.startswith("2.6."):
        return None
    return f"Lightning {version} was not tried: pip install 'lightning>=2.6,<2.7'"


def is_overridden(hook: str, module: L.LightningModule) -> bool:
    parents = kinds(L.LightningModule)
    return model_helpers.is_overridden(hook, module, next(one for one in parents if isinstance(module, one)))


HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
METHODS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")
"""Hooks within a step, and methods of a module that replace parts of one."""


def hooks_within_step(module: L.LightningModule, callbacks: Iterable[L.Callback]) -> Iterator[str]:
    """Those that call code of the user's on the host, which sees gradients and which no replay calls."""
    yield from (f"{type(module).__name__}.{hook}" for hook in (*HOOKS, *METHODS) if is_overridden(hook, module))
    plain = kinds(L.Callback)
    for callback in callbacks:
        for hook in HOOKS:
            if getattr(getattr(callback, hook), "__func__", None) not in [getattr(one, hook) for one in plain]:
                yield f"{type(callback).__name__}.{hook}"


def replace(owner: object, name: str, by: Any) -> Callable[[], None]:
    """Let ``owner.name`` be ``by`` until what is returned is called. An attribute of this one object, its class
    stays."""
    before, own = getattr(owner, name), name in vars(owner)
    vars(owner)[name] = by

    def undo() -> None:
        if own:
            vars(owner)[name] = before
        else:
            vars(owner).pop(name, None)

    return undo


@contextlib.contextmanager
def replaced(owner: object, name: str, by: Any) -> Iterator[Any]:
    """The same inside; yields what it was."""
    before, undo = getattr(owner, name), replace(owner, name, by)
    try:
        yield before
    finally:
        undo()


def muted(logger: Logger) -> Logger:
    """In the place of ``logger``: writes nothing, and says the same of itself."""
    properties = {n: property(attrgetter(f"of.{n}")) for n in ("name", "version", "save_dir", "log_dir")}
    mute: Any = type("Muted", (DummyLogger,), properties)()
    mute.of = logger  # not the class's: a DummyLogger, that of fast_dev_run, says that it is abstract
    return cast(Logger, mute)


def on_sigterm(trainer: L.Trainer, notice: Callable[[int, Any], None] | None, each_step: Callable[[], None]) -> None:
    """Let ``notice`` handle a SIGTERM, where it is given, and ``each_step`` act on it, in place of Lightning's own.

    Those of Lightning 2.6 broadcast from the handler, and in each step, where the host waits for the device:
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/training_epoch_loop.py
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/trainer/connectors/signal_connector.py
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    if notice is not None:
        connector._sigterm_notifier_fn = notice
    loop._broadcast_sigterm_tensor = each_step


def received_sigterm(trainer: L.Trainer) -> SystemExit:
    """What Lightning raises at a SIGTERM, as ``trainer.received_sigterm`` says from now on."""
    connector: Any = trainer._signal_connector
    connector.received_sigterm = True
    errors: Any = sys.modules[f"{package_of(trainer).__name__}.utilities.exceptions"]
    return cast(SystemExit, errors.SIGTERMException())


class LightningMicroBatch:
    """One call of ``_AutomaticOptimization.run``; see ``MicroBatch``."""

    def __init__(
        self,
        trainer: L.Trainer,
        optimizer: torch.optim.Optimizer,
        index: int,
        arguments: OrderedDict[str, Any],
        original: Callable[..., Any],
    ) -> None:
        self._trainer, self._optimizer, self._arguments, self._original = trainer, optimizer, arguments, original
        self._automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        self._progress: Any = None
        self.batch, self.index = arguments["batch"], index
        self.arguments: Mapping[str, Any] = arguments
        self.begins = index % trainer.accumulate_grad_batches == 0
        self.ends = not trainer.fit_loop._should_accumulate()

    def run(self, batch: Any) -> dict[str, Any]:
        return cast(dict[str, Any], self._original(self._optimizer, self.index, self._given(batch)))

    def forward_backward(self, batch: Any) -> dict[str, Any]:
        closure = self._automatic._make_closure(self._given(batch), self._optimizer, self.index)
        strategy = self._trainer.strategy
        apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(strategy, kinds(ParallelStrategy)) and not self.ends:
            apart = strategy.block_backward_sync()
        with apart:
            closure()
        return closure.consume_result().asdict()

    def forward(self, batch: Any, index: Any) -> Any:
        given = {**self._arguments, "batch": batch}
        if "batch_idx" in given:
            given["batch_idx"] = index
        with self._trainer.precision_plugin.train_step_context():  # without DDP, which would prepare for a backward
            return self._trainer.lightning_module.training_step(*given.values())

    def optimize(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        again = self._automatic._make_closure(self._arguments, self._optimizer, self.index)
        evaluations = 0

        def closure() -> Any:
            nonlocal evaluations
            evaluations += 1
            return outputs["loss"] if evaluations == 1 else again()

        self._automatic._optimizer_step(self.index, closure)
        return dict(outputs) if evaluations < 2 else again.consume_result().asdict()

    def count(self, *, whole: bool) -> None:
        progress = self._automatic.optim_progress.optimizer
        if self.begins:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if whole:
            progress.step.increment_ready()
            progress.step.increment_completed()

    def uncount(self) -> None:
        if self._progress is not None:
            self._automatic.optim_progress.optimizer = self._progress

    def _given(self, batch: Any) -> OrderedDict[str, Any]:
        if batch is self.batch:
            return self._arguments
        self._progress = copy.deepcopy(self._automatic.optim_progress.optimizer)
        return type(self._arguments)({**self._arguments, "batch": batch})


# ---- manual optimization -------------------------------------------------------------------------------------------
#
# The ``training_step`` of a module with ``automatic_optimization=False`` runs backward and steps the optimizers itself,
# one or several, once or more, or only for every so many batches. A step of it is therefore training steps in a row,
# from ``batch_idx=0`` on, until every optimizer has stepped.

MAX_BATCHES = 32
"""Training steps after which no optimizer is waited for that has not stepped yet."""


class ManualSteps:
    """Steps one module, whose ``arguments`` of a training step are made from a batch and its index, after the hook
    before the batch.

    The pieces are those of Lightning's manual loop, some of them private to it: optimizers count into its progress,
    from which ``trainer.global_step`` is read, and a gradient scaler scales. See ``_ManualOptimization`` in
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/loops/optimization/manual.py
    """

    def __init__(self, trainer: L.Trainer, arguments: Callable[[Any, int], Any]) -> None:
        self._trainer, self._arguments = trainer, arguments
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self.span: Span | None = None
        """Known after the first step, which goes on until every optimizer has stepped."""

    def step(
        self, batch: Any, inspect: Inspect | None, apart: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Tensor:
        """Take a step; returns the numbers that the training steps returned. Raises SkippedStep.

        ``inspect`` is called after every ``manual_backward`` with the loss that it was given, before any scaling. Every
        training step runs in an ``apart()`` of its own: after each one, Lightning tells DDP to reduce again.
        """
        stepped: set[int] = set()
        returned: list[Tensor] = []
        grown, span = 0, Span()
        with self._backwards(inspect) if inspect is not None else contextlib.nullcontext():
            for number in range(MAX_BATCHES if self.span is None else self.span.batches):
                counted, seen = self._trainer.global_step, len(stepped)
                with apart():
                    returned += _numbers(self._training_step(batch, number, stepped))
                grown += self._trainer.global_step > counted
                if len(stepped) > seen:
                    span = Span(batches=number + 1, steps=max(1, grown))
                if self.span is None and len(stepped) == len(self._trainer.optimizers):
                    break
        if not stepped and all(parameter.grad is None for parameter in self._trainer.lightning_module.parameters()):
            raise SkippedStep("training_step took no manual_backward and no optimizer step on the first batch")
        self.span = self.span or span
        return torch.stack(returned) if returned else torch.empty(0)

    def _training_step(self, batch: Any, number: int, stepped: set[int]) -> dict[str, Any]:
        """One ``training_step`` as the loop runs it; the numbers of the optimizers that step go into ``stepped``."""
        arguments = self._arguments(batch, number)
        self._loop.on_run_start()
        try:
            with contextlib.ExitStack() as hooks:
                for place, optimizer in enumerate(self._trainer.strategy._lightning_optimizers):
                    optimizer._on_after_step = _marking(stepped, place, optimizer._on_after_step)
                    # A step past Lightning counts as well, for instance of self.optimizers(use_pl_optimizer=False).
                    hooks.callback(optimizer.optimizer.register_step_post_hook(_marking(stepped, place)).remove)
                with contextlib.suppress(StopIteration):
                    self._loop.advance(arguments)
        finally:  # after an error too, which Lightning's own loop does not outlive
            outputs = self._loop.on_run_end()
        return outputs

    def _backwards(self, inspect: Inspect) -> contextlib.AbstractContextManager[Any]:
        strategy = self._trainer.strategy
        backward = strategy.backward

        def seen(loss: Tensor, *arguments: Any, **named: Any) -> Any:
            result = backward(loss, *arguments, **named)
            inspect(loss.detach())
            return result

        return replaced(strategy, "backward", seen)


def _marking(stepped: set[int], place: int, then: Callable[[], Any] | None = None) -> Callable[..., None]:
    def mark(*_: Any) -> None:
        stepped.add(place)
        if then is not None:
            then()

    return mark


def _numbers(outputs: Mapping[str, Any]) -> list[Tensor]:
    """The loss among what a training step returned; without one, every single number that is no integer."""
    found = [outputs["loss"]] if "loss" in outputs else [outputs[name] for name in sorted(outputs, key=str)]
    tensors = [torch.as_tensor(value).detach() for value in found if isinstance(value, float | Tensor)]
    return [tensor.float().cpu() for tensor in tensors if tensor.is_floating_point() and tensor.numel() == 1]
