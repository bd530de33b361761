"""Build one training and run it to its end: data, module, the Compile callback, Lightning's Trainer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import (  # type: ignore[attr-defined]
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from rich.console import Console
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from strategies.compile_errors import one_line
from tasks.base import Task, require_memory
from trainer.callback import Compile
from trainer.checkpoints import Checkpoints, FiniteLosses, Resuming, open_checkpoint
from trainer.console import ProgressView, announce
from trainer.loops.checkpoint_io import AtomicCheckpointIO
from trainer.loops.ddp import DDP
from trainer.loops.fsdp2 import FSDP2
from trainer.loops.lightning import LightningLoop
from trainer.loops.lightning_internals import leave_groups
from trainer.loops.rank_failures import StartedProcesses
from trainer.process import StopRequest, detect_launch, start_others
from trainer.run_files import DIRECTORY, find_checkpoint
from trainer.settings import Config, TrainerConfig
from trainer.telemetry.hardware import note_machine
from trainer.telemetry.meter import Counts
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import BatchCounter


class Job:
    """The parts of one training, built by ``train`` in the order in which a user's mistakes are cheapest to find."""

    def __init__(self, config: Config, record: RunRecord, run_dir: Path, console: Console) -> None:
        self._config, self._record, self._run_dir, self._console = config, record, run_dir, console
        self._compile: Compile | None = None
        self._started: StartedProcesses | None = None

    @property
    def started(self) -> bool:
        return self._compile is not None and self._compile.telemetry.phase != "starting"

    def root_cause(self, error: BaseException) -> BaseException:
        """What is behind ``error``: perhaps another process, which has failed."""
        return error if self._compile is None or self._compile.failed_by is None else self._compile.failed_by

    def wait_for_ranks(self) -> None:
        """Wait until the processes started here have ended as well. Raises RankFailed where one fails at that."""
        if self._started is not None:
            self._started.wait()

    def end(self) -> None:
        """This process ends, in whatever way; its groups are not taken down, which takes all processes."""
        leave_groups()
        if self._started is not None:
            self._started.end()

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages, if it came so far."""
        if self._compile is not None:
            self._compile.close_pages(summary)

    def train(self, stop: StopRequest) -> None:
        """Build everything and train to the end, to an error or to a stop."""
        config, settings, record = self._config, self._config.trainer, self._record
        checkpoint, saved = self._checkpoint()
        self._compile = compile_ = compile_callback(config, record)
        L.seed_everything(config.seed, verbose=False)
        losses = FiniteLosses(config.on_nonfinite_loss, compile_)
        every = settings.checkpoint_every_n_steps
        checkpoints = Checkpoints(self._run_dir, every_n_steps=every, stop=stop, losses=losses)
        trainer = build_trainer(config, self._run_dir, [Resuming(record.notes, saved), compile_, checkpoints])
        start_processes(trainer, self._run_dir)
        self._started = StartedProcesses(
            self._run_dir, lambda: None if compile_.failures is None else compile_.failures.left()
        )
        note_machine(record, LightningLoop(trainer))
        announce(self._console, record, self._run_dir)
        steps = settings.max_steps
        with ProgressView(self._console, style=settings.progress, total=steps, telemetry=lambda: compile_.telemetry):
            data = config.task.build_data(seed=config.seed)
            module = config.task.build_module(max_steps=steps)
            require_memory_of(module, trainer, record.command)
            try:
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
            except (RuntimeError, ValueError) as error:
                # A checkpoint that does not fit, found before the first step, is the user's.
                misfit = checkpoint is not None and re.search("state_dict|loaded state dict", str(error))
                if misfit and not self.started:
                    raise ValueError(
                        f"resume={config.resume}: the checkpoint belongs to another model than this; give the options "
                        f"of the run that wrote it: {one_line(error)}"
                    ) from error
                raise
            finally:
                record.skipped_items = getattr(data, "skipped", {})

    def _checkpoint(self) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
        """Where the run resumes from, and what that holds."""
        restarted = f"restarted by {self._record.launched_by}" if self._record.restarts else ""
        if self._config.resume is None:
            if restarted:
                self._record.notes.append(f"{restarted}: from the first step, there was no checkpoint yet")
            return None, None
        checkpoint = find_checkpoint(self._config.resume)
        saved = open_checkpoint(checkpoint)
        if (step := saved["global_step"]) >= self._config.trainer.max_steps:
            raise ValueError(
                f"resume={self._config.resume}: already at step {step}, "
                f"trainer.max_steps={self._config.trainer.max_steps} leaves nothing to do"
            )
        self._record.resumed_from = str(checkpoint.resolve())
        if restarted:
            self._record.notes.append(f"{restarted}: from step {step}, its last checkpoint")
        return checkpoint, saved


def compile_callback(config: Config, record: RunRecord) -> Compile:
    """The callback that applies the strategies and measures a training, with what the task declares."""
    declared = config.task.declare()
    return Compile(
        config.compile.values(),
        whole=declared.whole,
        blocks=declared.blocks,
        parts=declared.parts,
        ragged=declared.ragged,
        count=batch_counter(config.task),
        warmup_steps=config.trainer.warmup_steps,
        measure_peak=config.trainer.measure_peak,
        record=record,
        parity=config.parity,
        on_compile_error=config.on_compile_error,
        on_slower=config.on_slower,
        on_difference=config.on_difference,
        profile=config.profile,
    )


def batch_counter(task: Task) -> BatchCounter:
    """Counts batches by the task's rules; their operations are computed once for each size of batch."""
    flops: dict[tuple[int, int | None], int | None] = {}

    def count(batch: Any) -> Counts:
        counts = task.count(batch)
        size = (counts.samples, counts.tokens)
        if size not in flops or counts.attended is not None:  # then no two batches are of one size
            flops[size] = task.training_flops(batch)
        return counts.samples, counts.tokens, counts.useful_tokens, flops[size]

    return count


def build_trainer(config: Config, run_dir: Path, callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer with the options that cost time in every step switched off.

    Progress and logging are ours: a progress-bar value is one device synchronisation a step, a ``self.log`` about
    0.3 ms, and ThroughputMonitor synchronises at every batch. Raises ValueError that names the option for what this
    machine does not have.
    """
    settings = config.trainer
    if settings.strategy in ("fsdp", "fsdp_cpu_offload") and settings.gradient_clip_val is not None:
        raise ValueError(
            f"trainer.strategy={settings.strategy}: Lightning's FSDP cannot clip gradients by their norm; use "
            "trainer.strategy=fsdp2, or trainer.gradient_clip_val=null"
        )
    validates = settings.val_every_n_steps > 0
    if validates and config.task.monitor is not None:
        best = ModelCheckpoint(
            dirpath=run_dir / DIRECTORY, filename="best", monitor=config.task.monitor, enable_version_counter=False
        )
        callbacks = [*callbacks, best]
    precision = precision_arguments(settings)
    arguments: dict[str, Any] = {
        "accelerator": settings.accelerator,
        "devices": 1 if settings.devices is None else settings.devices,
        "num_nodes": settings.num_nodes or 1,
        "precision": precision.get("precision"),
        "deterministic": settings.deterministic,
        "max_steps": settings.max_steps,
        "max_epochs": -1,
        "accumulate_grad_batches": settings.accumulate_grad_batches,
        "gradient_clip_val": settings.gradient_clip_val,
        "val_check_interval": settings.val_every_n_steps * settings.accumulate_grad_batches if validates else None,
        "check_val_every_n_epoch": None if validates else 1,
        "limit_val_batches": (1.0 if settings.val_batches is None else settings.val_batches) if validates else 0,
        "log_every_n_steps": settings.log_every_n_steps,
        "callbacks": callbacks,
        "enable_checkpointing": validates and config.task.monitor is not None,
        "num_sanity_val_steps": 0,  # its graphs and its seconds would come before the first step that is timed
        "inference_mode": False,  # no_grad instead, so that every validation shares one set of graphs
        "default_root_dir": run_dir,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_autolog_hparams": False,
    }
    try:
        # Points go straight into the run's directory; without default_hp_metric=False its HParams table is one column.
        arguments["logger"] = RunLogger(save_dir=run_dir, name="", version="", default_hp_metric=False)
        checkpoints = AtomicCheckpointIO(background=settings.async_checkpoints)
        arguments["plugins"] = [checkpoints, *cluster(), *precision["plugins"]]
        trainer = L.Trainer(**arguments, strategy=_strategy(config, settings.strategy))
        if settings.strategy == "auto" and type(trainer.strategy) is DDPStrategy:  # on several devices
            trainer = L.Trainer(**arguments, strategy=_strategy(config, "ddp"))
    except Exception as error:
        given: dict[str, Any] = {}
        # What a machine may not have: the first one that Lightning does not take beside those before it, in its order.
        for name in ("accelerator", "devices", "strategy", "precision"):
            given[name] = _strategy(config, settings.strategy) if name == "strategy" else arguments[name]
            try:
                L.Trainer(**given, plugins=[LightningEnvironment()], logger=False, enable_progress_bar=False)
            except Exception as reason:
                reasons = str(reason).strip().splitlines() or [type(reason).__name__]
                raise ValueError(f"trainer.{name}={getattr(settings, name)}: {reasons[0].rstrip('.')}") from error
        raise

    return trainer


def start_processes(trainer: L.Trainer, run_dir: Path) -> None:
    """Start the others where Lightning is about to run the command again."""
    launcher: Any = trainer.strategy.launcher
    if hasattr(launcher, "procs") and not launcher.cluster_environment.creates_processes_externally:
        start_others(trainer.num_devices - 1, run_dir)


class RunLogger(TensorBoardLogger):
    """Without the ``epoch`` that Lightning adds to all that a module logs: it would be TensorBoard's first card."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)


def _strategy(config: Config, name: str) -> Strategy | str:
    """Ours for ``name``, or the name for Lightning."""
    if name == "fsdp2":
        return FSDP2(
            reshard_after_forward=config.trainer.reshard_after_forward,
            reshard_after_backward=config.trainer.reshard_after_backward,
            reduce_each_micro_batch=config.trainer.reduce_each_micro_batch,
            save_distributed_checkpoint=config.trainer.sharded_checkpoints,
        )
    if name not in ("ddp", "ddp_find_unused_parameters_true"):
        return name
    captures = any(strategy.captures_step for strategy in config.compile.values())
    return DDP(captures=captures, find_unused_parameters=name != "ddp")


def cluster() -> list[ClusterEnvironment]:
    """What Lightning is to take for the starter of the processes, where its guess is not that of ``detect_launch``."""
    launch = detect_launch(os.environ)
    if launch is not None:
        # Lightning's own requeue saves within a signal's handler, in the middle of a step; ours stops after it.
        return [SLURMEnvironment(auto_requeue=False) if launch.by == "SLURM" else TorchElasticEnvironment()]
    # In a job of one task, or a shell within one, Lightning would start no processes, and train on one device.
    return [LightningEnvironment()] if "SLURM_NTASKS" in os.environ else []


def require_memory_of(module: L.LightningModule, trainer: L.Trainer, command: Sequence[str]) -> None:
    """Raise ValueError where the parameters alone are more than the device's memory; ``command`` names the options that
    made them so many."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return  # spread over devices
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    most = 8 if str(trainer.precision).endswith("-mixed") or trainer.precision in ("32-true", "64-true") else 2
    device = trainer.strategy.root_device
    require_memory(
        f"{task_options(command)}: {sum(each.numel() for each in parameters):,} parameters",
        sum(each.numel() * min(each.element_size(), most) for each in parameters),
        device=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
    )


def task_options(command: Sequence[str]) -> str:
    """What the command says of the task, for errors: its last value of each option."""
    given = {part.partition("=")[0]: part for part in command if part.lstrip("+").startswith(("task", "experiment="))}
    return " ".join(given.values()) or "the task"


class Mixed(MixedPrecision):
    """Autocast that clips gradients of a fused optimizer, which Lightning's own refuses: such an optimizer undoes the
    gradient scaling inside its step. bf16 has none; of fp16 they are unscaled before, as those of any other one."""

    def optimizer_step(self, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        if self.scaler is not None:
            optimizer._step_supports_amp_scaling = False  # Lightning and torch's scaler read this at each step
        return super().optimizer_step(optimizer, *arguments, **named)

    def clip_gradients(self, optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
        """Clip as in full precision."""
        Precision.clip_gradients(self, optimizer, *arguments, **named)


def resolve_precision(config: TrainerConfig) -> str:
    """Lightning's name for the precision; ``auto`` is bf16 autocast on a CUDA GPU that has it and fp32 elsewhere."""
    if config.precision != "auto":
        return config.precision
    has_bf16 = on_cuda(config) and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bf16 else "32-true"


def precision_arguments(config: TrainerConfig) -> dict[str, Any]:
    """The arguments of ``lightning.Trainer`` that set the precision."""
    precision = resolve_precision(config)
    device = "cuda" if on_cuda(config) else "cpu"
    # Sharded strategies of Lightning's bring their own.
    unsharded = config.strategy in ("auto", "ddp", "ddp_find_unused_parameters_true")
    if precision == "bf16-mixed" and (unsharded or config.strategy == "fsdp2"):
        return {"plugins": [Mixed("bf16-mixed", device)]}
    if precision == "16-mixed" and unsharded and config.accelerator != "mps":
        # On a CPU, too, where Lightning's own choice would be bf16 after all.
        return {"plugins": [Mixed("16-mixed", device, torch.amp.GradScaler(device))]}
    return {"precision": precision, "plugins": []}


def on_cuda(config: TrainerConfig) -> bool:
    return config.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def device_of(config: TrainerConfig) -> torch.device:
    """The device of a run on one: what Lightning would take."""
    return torch.device("cuda", 0) if on_cuda(config) else torch.device("cpu")
