"""Lightning's private pieces: which of its names we use, what stands in for some, and one micro-batch made of them.

Lightning is pinned below its next minor version, and a user may install another one all the same. Names that are gone
there end nothing: ``missing`` says which they are, and what needs them is left out with that reason.
"""

from __future__ import annotations

import contextlib
import copy
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ParallelStrategy

CALL = "lightning.pytorch.trainer.call"
"""Calls hooks. https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/trainer/call.py"""
DUMMY_LOGGER = "lightning.pytorch.loggers.logger:DummyLogger"
OF_LIGHTNING = (
    DUMMY_LOGGER,
    f"{CALL}:_call_callback_hooks",
    f"{CALL}:_call_lightning_module_hook",
    f"{CALL}:_call_strategy_hook",
)
_LOOP = "fit_loop.epoch_loop"
OF_TRAINER = (
    "_detect_anomaly",
    "_loggers",
    "fit_loop._should_accumulate",
    f"{_LOOP}._build_kwargs",
    f"{_LOOP}._results",
    f"{_LOOP}.automatic_optimization._make_closure",
    f"{_LOOP}.automatic_optimization._optimizer_step",
    f"{_LOOP}.automatic_optimization._training_step",
    f"{_LOOP}.automatic_optimization.optim_progress",
    f"{_LOOP}.automatic_optimization.output_result_cls",
    f"{_LOOP}.manual_optimization.advance",
    f"{_LOOP}.manual_optimization.optim_step_progress",
    f"{_LOOP}.val_loop._build_kwargs",
    f"{_LOOP}.val_loop._build_step_args_from_hook_kwargs",
    "lightning_module._current_fx_name",
    "lightning_module._on_before_batch_transfer",
    "precision_plugin._after_closure",
    "strategy._lightning_optimizers",
)
"""Seen from a Trainer that trains."""


def resolve(name: str) -> Any:
    """Lightning's own ``name``. Raises RuntimeError where this version of Lightning has none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(gone([name])) from error


def gone(names: list[str]) -> str:
    """That this version of Lightning lacks ``names``, and what to do."""
    return f"Lightning {L.__version__} has no {', '.join(names)}: pip install 'lightning>=2.6,<2.7'"


def missing(trainer: L.Trainer) -> list[str]:
    """Names without which no step can be run apart from the training."""
    lost = []
    for name in OF_LIGHTNING:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            lost.append(name)
    for name in OF_TRAINER:
        try:
            attrgetter(name)(trainer)
        except AttributeError:
            lost.append(f"Trainer.{name}")
    return lost


@contextlib.contextmanager
def replaced(owner: object, name: str, by: Any) -> Iterator[Any]:
    """Inside, ``owner.name`` is ``by``; yields what it was. An attribute of this one object, its class stays."""
    before, own = getattr(owner, name), name in vars(owner)
    vars(owner)[name] = by
    try:
        yield before
    finally:
        if own:
            vars(owner)[name] = before
        else:
            vars(owner).pop(name, None)


def muted(logger: Logger) -> Logger:
    """In the place of ``logger``: writes nothing, and says the same of itself."""
    said = {n: property(attrgetter(f"of.{n}")) for n in ("name", "version", "save_dir", "log_dir")}
    return cast(Logger, type("Muted", (resolve(DUMMY_LOGGER),), {"of": logger, **said})())


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


def on_start(trainer: L.Trainer, start: Callable[..., Any], done: Callable[[], None]) -> None:
    """Let ``start`` stand in for ``subprocess.Popen`` where Lightning runs the command again for each device, and call
    ``done`` afterwards; at once where this Trainer does no such thing.

    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/strategies/launchers/subprocess_script.py
    """
    launcher: Any = trainer.strategy.launcher
    module = sys.modules.get(type(launcher).__module__)
    call = getattr(launcher, "_call_children_scripts", None)
    if call is None or not hasattr(module, "subprocess"):
        done()
        return

    def call_children_scripts() -> None:
        with replaced(module, "subprocess", SimpleNamespace(Popen=start)):
            call()
        done()

    launcher._call_children_scripts = call_children_scripts


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
        if isinstance(strategy, ParallelStrategy) and not self.ends:
            apart = strategy.block_backward_sync()
        with apart:
            closure()
        return closure.consume_result().asdict()

    def forward(self, batch: Any, index: Any) -> None:
        given = {**self._arguments, "batch": batch}
        if "batch_idx" in given:
            given["batch_idx"] = index
        with self._trainer.precision_plugin.train_step_context():  # without DDP, which would prepare for a backward
            self._trainer.lightning_module.training_step(*given.values())

    def optimize(self, outputs: Mapping[str, Any]) -> None:
        self._automatic._optimizer_step(self.index, lambda: outputs["loss"])

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
