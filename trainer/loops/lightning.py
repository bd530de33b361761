"""Lightning's Trainer behind the protocol ``Loop``, made of the pieces of ``lightning_internals``.

A step that is captured is made of Lightning's own pieces (its closure and its hooks), so that whatever the module or a
Lightning strategy has overridden is in force. See ``_AutomaticOptimization`` in
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/optimization/automatic.py
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from strategies.loop_protocol import LogCall, RunMicroBatch
from trainer.loops.ddp import DDP_WARMUP_STEPS
from trainer.loops.lightning_internals import (
    LightningMicroBatch,
    hooks_within_step,
    is_overridden,
    lightning_classes,
    replace,
    replaced,
    untested_version,
)
from trainer.loops.ranks import RankReductions

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = TypeVar("Value")
_LOG_PARAMETERS = tuple(inspect.signature(L.LightningModule.log).parameters)[3:]


class LightningLoop(RankReductions):
    """The training loop of one ``Trainer.fit``; see ``Loop`` for what the members mean."""

    def __init__(self, trainer: L.Trainer, *, cuda_graphs: bool = False) -> None:
        self._trainer = trainer
        self.cuda_graphs = cuda_graphs
        self.module = trainer.lightning_module
        self.manual = self.module is not None and not self.module.automatic_optimization
        self.scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.device, self.precision = trainer.strategy.root_device, str(trainer.precision)
        self.world_size, self.is_first_process = trainer.world_size, trainer.is_global_zero
        self.directory = trainer.default_root_dir
        self.log_every_n_steps = trainer.log_every_n_steps or 50  # type: ignore[attr-defined]  # 0: Lightning logs nothing

    # ---- facts -----------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._trainer.optimizers

    @property
    def schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    @property
    def micro_batches(self) -> int:
        return self._trainer.accumulate_grad_batches

    @property
    def steps_done(self) -> int:
        return self._trainer.global_step

    @property
    def steps_planned(self) -> int | None:
        try:
            planned = self._trainer.estimated_stepping_batches
        except Exception:  # MisconfigurationException, a private class, for a loader without a length
            return None
        return None if planned in (-1, float("inf")) else int(planned)

    @property
    def position(self) -> tuple[int, int]:
        return self._trainer.current_epoch, self._trainer.fit_loop.batch_idx

    @property
    def validates(self) -> bool:
        return bool(self._trainer.enable_validation) and is_overridden("validation_step", self.module)

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        return self._trainer.callback_metrics

    @property
    def writer(self) -> SummaryWriter | None:
        loggers = self._trainer.loggers if self.is_first_process else ()
        return next(
            (logger.experiment for logger in loggers if isinstance(logger, lightning_classes(TensorBoardLogger))), None
        )

    def logs(self, name: str) -> bool:
        known = [one.meta for one in self._trainer.fit_loop.epoch_loop._results.values()]
        return any(one.name == name and not one.forked for one in known)

    def log_figures(self, values: Mapping[str, float], step: int) -> None:
        for logger in self._trainer.loggers if self.is_first_process else ():
            if not isinstance(logger, lightning_classes(TensorBoardLogger)):
                logger.log_metrics(dict(values), step)

    # ---- standing around the loop's own steps ----------------------------------------------------------------------

    def capture_obstacles(self) -> Iterator[str]:
        module = self.module
        if (reason := untested_version(self._trainer)) is not None:
            yield reason
            return
        if not module.automatic_optimization:
            yield "manual optimization: the training step itself steps the optimizers"
            return
        if len(self.optimizers) != 1:
            yield f"{len(self.optimizers)} optimizers"
        for hook in hooks_within_step(module, self._trainer.callbacks):  # type: ignore[attr-defined]
            yield f"{hook} is called on the host in every step"
        if self._trainer._detect_anomaly:
            yield "detect_anomaly reads every gradient on the host"

    def unreadable_types(self) -> dict[type, str]:
        return dict.fromkeys(lightning_classes(Logger), "which a replay would not call: use self.log")

    def constants(self) -> Hashable:
        trainer = self._trainer
        return trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.gradient_clip_algorithm

    def wrap_step(self, run: RunMicroBatch) -> Callable[[], None]:
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        original = automatic.run

        def ours(optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
            if "batch" not in kwargs:  # the training step takes an iterator of batches
                return original(optimizer, batch_idx, kwargs)
            return run(LightningMicroBatch(self._trainer, optimizer, batch_idx, kwargs, original))

        # An attribute of this one object, because Lightning offers no way to bring an optimization loop of one's own.
        return replace(automatic, "run", ours)

    @contextlib.contextmanager
    def recording_logs(self) -> Iterator[list[tuple[LogCall, Any]]]:
        calls: list[tuple[LogCall, Any]] = []

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            named = dict(zip(_LOG_PARAMETERS, arguments, strict=False))
            kept = value.detach() if isinstance(value, Tensor) else value
            calls.append((LogCall(name, {**named, **options}), kept))

        def log_dict(dictionary: Any, *arguments: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, *arguments, **options)

        # Not by ``vars``: whoever observes the step would take that for a read of all attributes.
        self.module.log, self.module.log_dict = log, log_dict  # type: ignore[method-assign]
        try:
            yield calls
        finally:
            del self.module.log, self.module.log_dict

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        with replaced(self.module, "_current_fx_name", "training_step"):
            for logged, value in calls:
                self.module.log(logged.name, value, **logged.options)

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        # Lightning's loops hand these methods to their data fetcher, which calls them around each ``next``.
        # https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/fetchers.py
        loop, undo = self._trainer.fit_loop.epoch_loop, contextlib.ExitStack()
        for hook, ours in {"_on_before_fetch": before, "_on_after_fetch": after}.items():
            if hasattr(loop, hook):  # else waiting for data is not measured
                both = partial(lambda theirs, ours: (theirs(), ours()), getattr(loop, hook), ours)
                undo.enter_context(replaced(loop, hook, both))
        return undo.close

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        save = self._trainer.save_checkpoint
        if self._trainer.ckpt_path is not None:
            saved(str(self._trainer.ckpt_path))

        def save_checkpoint(filepath: Any, *arguments: Any, **named: Any) -> None:
            save(filepath, *arguments, **named)
            saved(str(filepath))

        return replace(self._trainer, "save_checkpoint", save_checkpoint)

    # ---- several processes -----------------------------------------------------------------------------------------

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        strategy = self._trainer.strategy
        return cast(Tensor, strategy.reduce(tensor.to(strategy.root_device), reduce_op=how))

    def collectives_obstacle(self) -> str | None:
        strategy = self._trainer.strategy
        if isinstance(strategy, lightning_classes(SingleDeviceStrategy, ModelParallelStrategy)):
            # Options of ours: what is gathered or reduced differs between the micro-batches of a step then.
            kept = not getattr(strategy, "reshard_after_backward", True) or getattr(
                strategy, "reduce_each_micro_batch", False
            )
            if kept and self._trainer.accumulate_grad_batches > 1:
                return "with accumulation, reshard_after_backward=false and reduce_each_micro_batch=true run uncaptured"
            return None
        model = strategy.model
        if not isinstance(strategy, lightning_classes(DDPStrategy)) or not isinstance(model, DistributedDataParallel):
            return f"no graph holds the steps of {type(strategy).__name__}; under ddp and fsdp2 it does"
        if model.find_unused_parameters:
            return "DDP with find_unused_parameters asks the device in every step which parameters were used"
        if model.static_graph:
            return "DDP with static_graph=True is not compared with eager, so that nothing would check its graphs"
        return None

    @property
    def capture_warmup_steps(self) -> int:
        return DDP_WARMUP_STEPS if isinstance(self._trainer.strategy, lightning_classes(DDPStrategy)) else 0

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return getattr(self._trainer.strategy, "stream", None)


def throwaway_trainer(folder: str, module: L.LightningModule, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Lightning's Trainer for ``module``, which writes nothing but what a module itself writes into ``folder``."""
    # A module of pytorch_lightning needs the Trainer of that package.
    trainer = lightning_classes(L.Trainer)[0 if isinstance(module, L.LightningModule) else -1]
    return trainer(
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(folder),
        num_sanity_val_steps=0,
        **options,
    )
