"""Lightning's Trainer behind the protocol ``strategies.loop.Loop``, made of the pieces of ``private``.

A step that is run apart is made of Lightning's own pieces (its closure and its hooks), so that whatever the module or a
Lightning strategy has overridden is in force. See ``_AutomaticOptimization`` in
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/loops/optimization/automatic.py
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.loop import Inspect, LogCall, RunMicroBatch, SkippedStep, Span
from strategies.torch_patches import as_capturing
from trainer.loops.private import (
    LightningMicroBatch,
    ManualSteps,
    hooks_within_step,
    is_overridden,
    kinds,
    muted,
    package_of,
    replace,
    replaced,
    untried,
)
from trainer.loops.processes import Processes, evaluating

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = TypeVar("Value")
_LOG_PARAMETERS = tuple(inspect.signature(L.LightningModule.log).parameters)[3:]


class LightningLoop(Processes):
    """The training loop of one ``Trainer.fit``; see ``Loop`` for what the members mean."""

    def __init__(self, trainer: L.Trainer, *, cuda_graphs: bool = False) -> None:
        self._trainer, self._call = trainer, package_of(trainer).trainer.call
        self.cuda_graphs = cuda_graphs
        self.module = trainer.lightning_module
        self.manual = self.module is not None and not self.module.automatic_optimization
        self._manual = ManualSteps(trainer, self._arguments) if self.manual else None
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
        return next((logger.experiment for logger in loggers if isinstance(logger, kinds(TensorBoardLogger))), None)

    def logs(self, name: str) -> bool:
        known = [one.meta for one in self._trainer.fit_loop.epoch_loop._results.values()]
        return any(one.name == name and not one.forked for one in known)

    def log_figures(self, values: Mapping[str, float], step: int) -> None:
        for logger in self._trainer.loggers if self.is_first_process else ():
            if not isinstance(logger, kinds(TensorBoardLogger)):
                logger.log_metrics(dict(values), step)

    def counters(self) -> list[object]:
        loop = self._trainer.fit_loop.epoch_loop
        return [loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress]

    # ---- single steps on a batch at hand ---------------------------------------------------------------------------

    def why_not_apart(self) -> str | None:
        trainer = self._trainer
        if not isinstance(trainer.strategy, kinds(SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
            return f"{type(trainer.strategy).__name__} keeps state that cannot be copied and restored"
        if getattr(trainer.strategy.model, "static_graph", False):
            return "DDP with static_graph=True takes what its first backward does for what all later ones do"
        if (reason := untried(self._trainer)) is not None:
            return reason
        if "dataloader_iter" in inspect.signature(self.module.training_step).parameters:
            return "training_step takes its batches from the loader itself (dataloader_iter)"
        if not self.manual:
            return None if len(trainer.optimizers) == 1 else f"the module has {len(trainer.optimizers)} optimizers"
        if isinstance(trainer.strategy, kinds(ModelParallelStrategy)):
            return "manual optimization of sharded parameters: whether all of it comes back was not tried"
        if not any(optimizer.param_groups for optimizer in trainer.optimizers):  # Lightning has a mock in place of none
            return "manual optimization, and not with optimizers of configure_optimizers, which could be restored"
        return None

    @property
    def span(self) -> Span:
        return Span() if self._manual is None or self._manual.span is None else self._manual.span

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        trainer, module, call_hooks = self._trainer, self.module, self._call._call_callback_hooks

        def of_others(whose: L.Trainer, *given: Any, **named: Any) -> None:
            if whose is not trainer:
                call_hooks(whose, *given, **named)

        with (
            # Other threads read these at any time: a progress bar finds itself in ``trainer.callbacks``. So that list
            # stays as it is, only its hooks are not called, and what stands in for a logger says what the logger says.
            replaced(self._call, "_call_callback_hooks", of_others),
            replaced(trainer, "_loggers", [muted(logger) for logger in trainer.loggers]),
            # A manual step tells it when an optimizer step begins, and not when that ends with an error.
            replaced(trainer, "profiler", PassThroughProfiler()),
            replaced(module, "_current_fx_name", module._current_fx_name),
            replaced(module, "log", _log_nothing),
            replaced(module, "log_dict", _log_nothing),
            replaced(trainer.fit_loop.epoch_loop._results, "log", _log_nothing),
        ):
            yield

    def train(self, batch: Any, inspect: Inspect | None = None, *, together: bool = True) -> Tensor:
        if self._manual is not None:
            return self._manual.step(batch, inspect, contextlib.nullcontext if together else self.apart)
        closure = self._closure(batch, inspect)
        with contextlib.nullcontext() if together else self.apart():
            return closure()

    def step(self, batch: Any, inspect: Inspect | None = None) -> Tensor:
        if self._manual is not None:
            return self._manual.step(batch, inspect, contextlib.nullcontext)
        losses: list[Tensor] = []
        closure = self._closure(batch, inspect)

        def keep_loss() -> Tensor:
            losses.append(closure())
            return losses[-1]

        trainer = self._trainer
        optimizer = trainer.strategy._lightning_optimizers[0]
        self._call._call_lightning_module_hook(
            trainer, "optimizer_step", trainer.current_epoch, 0, optimizer, keep_loss
        )
        return losses[-1]

    def forward_loss(self, arguments: Mapping[str, Any]) -> Tensor | None:
        results = self._trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
        model: Any = self._trainer.strategy.model
        with contextlib.ExitStack() as kept:
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):  # its note to synchronise buffers
                kept.callback(setattr, model, "require_forward_param_sync", model.require_forward_param_sync)
            return results.from_training_step_output(self._training_step(arguments), self.micro_batches).loss

    def evaluate(self, batch: Any, step: str = "validation_step") -> Any:
        trainer, batch = self._trainer, _rebuilt(batch)
        loop = trainer.fit_loop.epoch_loop.val_loop
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        inference = torch.inference_mode() if loop.inference_mode else contextlib.nullcontext()
        with evaluating(self.module), as_capturing(False), inference:
            if step == "training_step":
                return self._training_step(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0))
            self._call._call_lightning_module_hook(trainer, "on_validation_epoch_start")
            self._call._call_lightning_module_hook(trainer, "on_validation_batch_start", batch, 0)
            given = loop._build_step_args_from_hook_kwargs(loop._build_kwargs(batch, 0, None), step)
            return self._call._call_strategy_hook(trainer, step, *given)

    def to_device(self, batch: Any) -> Any:
        """Convert and move a batch as Lightning's loops do, hooks of the module and the data module included."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._call._call_strategy_hook(self._trainer, "batch_to_device", batch, dataloader_idx=0)

    # ---- standing around the loop's own steps ----------------------------------------------------------------------

    def why_not_capture(self) -> Iterator[str]:
        module = self.module
        if (reason := untried(self._trainer)) is not None:
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

    def unreadable(self) -> dict[type, str]:
        return dict.fromkeys(kinds(Logger), "which a replay would not call: use self.log")

    def constants(self) -> Hashable:
        trainer = self._trainer
        return trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.gradient_clip_algorithm

    def take_over(self, run: RunMicroBatch) -> Callable[[], None]:
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        original = automatic.run

        def ours(optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
            if "batch" not in kwargs:  # the training step takes an iterator of batches
                return original(optimizer, batch_idx, kwargs)
            return run(LightningMicroBatch(self._trainer, optimizer, batch_idx, kwargs, original))

        # An attribute of this one object, because Lightning offers no way to bring an optimization loop of one's own.
        return replace(automatic, "run", ours)

    def clip_with(self, clip: Callable[[torch.optim.Optimizer, float], bool]) -> Callable[[], None]:
        plugin = self._trainer.precision_plugin
        theirs = plugin.clip_grad_by_norm
        # The base class's is torch's clip_grad_norm_ over the optimizer's parameters; other plug-ins clip otherwise.
        own = type(plugin).clip_grad_by_norm not in [one.clip_grad_by_norm for one in kinds(Precision)]
        if own or self.manual or is_overridden("configure_gradient_clipping", self.module):
            return lambda: None

        def ours(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            if not clip(optimizer, float(clip_val)):
                theirs(optimizer, clip_val)

        # An attribute of this one plug-in object: Lightning has no hook that could leave the gradients as they are.
        return replace(plugin, "clip_grad_by_norm", ours)

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

    @contextlib.contextmanager
    def around_training_step(
        self, before: Callable[[Mapping[str, Any]], None], after: Callable[[Tensor | None], None]
    ) -> Iterator[None]:
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        step = automatic._training_step

        def training_step(arguments: OrderedDict[str, Any]) -> Any:
            before(arguments)
            result = step(arguments)
            after(result.loss)
            return result

        with replaced(automatic, "_training_step", training_step):
            yield

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

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _training_step(self, arguments: Mapping[str, Any]) -> Any:
        return self._call._call_strategy_hook(self._trainer, "training_step", *arguments.values())

    def _closure(self, batch: Any, inspect: Inspect | None) -> Callable[[], Tensor]:
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        closure = automatic._make_closure(self._arguments(batch, 0), self._trainer.optimizers[0], 0)

        def run() -> Tensor:
            loss = closure()
            if loss is None:
                raise SkippedStep("training_step returned None on the first batch")
            if inspect is not None:
                inspect(loss)
            return loss.detach()

        return run

    def _arguments(self, batch: Any, number: int) -> OrderedDict[str, Any]:
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        batch = _rebuilt(batch)
        self._call._call_lightning_module_hook(self._trainer, "on_train_batch_start", batch, number)
        return self._trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, number)


def throwaway_trainer(folder: str, module: L.LightningModule, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Lightning's Trainer for ``module``, which writes nothing but what a module itself writes into ``folder``."""
    # A module of pytorch_lightning needs the Trainer of that package.
    trainer = kinds(L.Trainer)[0 if isinstance(module, L.LightningModule) else -1]
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


def _rebuilt(batch: Any) -> Any:
    """The same tensors in containers of their own: a step may take entries out, and further steps take the batch."""
    return pytree.tree_map(lambda one: copy.copy(one) if isinstance(one, MutableMapping) else one, batch)


def _log_nothing(*_: Any, **__: Any) -> None: ...
