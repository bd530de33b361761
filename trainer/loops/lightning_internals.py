"""Lightning's private pieces, and what stands in for some.

Lightning is pinned below its next minor version, and a user may install another one all the same. Then nothing ends:
what needs names that it may have renamed is left out, with that reason (``untested_version``).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities import distributed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import model_helpers


def lightning_classes(*classes: Any) -> tuple[Any, ...]:
    """Lightning's ``classes`` and those of the same names in ``pytorch_lightning``, a copy of ``lightning.pytorch``.

    Users import one or the other, and an object of one is not an instance of the other's class.
    """
    modules = [sys.modules.get(one.__module__.replace("lightning.pytorch", "pytorch_lightning")) for one in classes]
    return (*classes, *(getattr(module, one.__name__) for module, one in zip(modules, classes, strict=True) if module))


def package_of(trainer: L.Trainer) -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``, of which ``trainer`` is one."""
    kind = next(one for one in lightning_classes(L.Trainer) if isinstance(trainer, one))
    return sys.modules[kind.__module__.removesuffix(".trainer.trainer")]


def untested_version(trainer: L.Trainer) -> str | None:
    """Why no step is captured in this version of Lightning; None where it was tried."""
    version = package_of(trainer).__version__
    if version.startswith("2.6."):
        return None
    return f"Lightning {version} was not tried: pip install 'lightning>=2.6,<2.7'"


def is_overridden(hook: str, module: L.LightningModule) -> bool:
    parents = lightning_classes(L.LightningModule)
    return model_helpers.is_overridden(hook, module, next(one for one in parents if isinstance(module, one)))


def leave_groups() -> None:
    """Let this process end without taking its process groups down, as Lightning does at exit. NCCL takes a group down
    together (``ncclCommFinalize``): a process would wait there for the first one, which waits for its exit."""
    for module in (distributed, sys.modules.get("lightning_fabric.utilities.distributed")):
        if (takes_down := getattr(module, "_destroy_dist_connection", None)) is not None:
            atexit.unregister(takes_down)


HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
METHODS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")
"""Hooks within a step, and methods of a module that replace parts of one."""


def hooks_within_step(module: L.LightningModule, callbacks: Iterable[L.Callback]) -> Iterator[str]:
    """Those that call code of the user's on the host, which sees gradients and which no replay calls."""
    yield from (f"{type(module).__name__}.{hook}" for hook in (*HOOKS, *METHODS) if is_overridden(hook, module))
    plain = lightning_classes(L.Callback)
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


@contextlib.contextmanager
def sigterm_kept(trainer: L.Trainer) -> Iterator[None]:
    """Afterwards a SIGTERM is handled as before, whatever ``on_sigterm`` has changed inside."""
    connector: Any = trainer._signal_connector
    places: list[tuple[object, str]] = [(connector, "_sigterm_notifier_fn")]
    places.append((trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"))
    before = [(vars(owner), name, vars(owner).get(name)) for owner, name in places]
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes.pop(name, None)
            if value is not None:
                attributes[name] = value


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
        if isinstance(strategy, lightning_classes(ParallelStrategy)) and not self.ends:
            apart = strategy.block_backward_sync()
        with apart:
            closure()
        return closure.consume_result().asdict()

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
