"""The Compile callback: brings strategies into any Lightning training and measures what they cost and gave.

    L.Trainer(callbacks=[Compile([Regional()])])

It binds the core, ``trainer.loops.compiled_training``, to Lightning's hooks. It is one callback on purpose: Lightning
spends about 10 microseconds a step on every further one, used or not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.nn.parameter import is_lazy

from strategies.base import label
from strategies.loop_protocol import group_timeout
from trainer.advice import speaking_python
from trainer.guards import CompiledNothing, CompileFailed, ParityError
from trainer.loops.compiled_training import CompiledTraining
from trainer.loops.lightning import LightningLoop
from trainer.loops.lightning_internals import leave_groups, lightning_classes, replaced, sigterm_kept
from trainer.loops.rank_failures import Deadline, Failures
from trainer.loops.ranks import EpochEnds, SigtermAgreement, code_of, compare_facts, epoch_ends
from trainer.telemetry.record import TrainingInfo
from trainer.wording import flatten

__all__ = ["Compile", "CompileFailed", "CompiledNothing", "ParityError"]

SHARED_FOLDER = "compile_runs"
"""Below the Trainer's ``default_root_dir``: records of trainings without a folder of logs."""


class Compile(CompiledTraining, L.Callback):
    """Applies strategies in place before training starts, verifies that they compiled, and keeps the telemetry.

    Args:
        strategies: What to apply; empty means eager, measured by the same code.
        whole, blocks, parts: What the module declares to the compiler, see ``strategies.Program``.
        ragged: The batch's tensors of ragged length, see ``strategies.Ragged``.
        count: Counts a batch for the throughput figures, see ``BatchCounter``; None leaves them out.
        warmup_steps: Optimizer steps left out of the steady figures even when nothing is compiled.
        measure_peak: Whether to time a product of large matrices first; None = on a CUDA device.
        record: Filled in as the run goes, by an owner who completes it, saves it and prints what it says. None: a
            new one for each training, complete when that is over.
        save: Whether that one is saved where the training logs, in a folder that holds no other.
        verbose: Whether the progress of compiling, and at the end that record's table and verdict are printed.
        profile: ``on``: torch's profiler records a few steady steps into ``<default_root_dir>/profile``; they are left
            out of the steady figures.
        parity, on_compile_error, on_slower, on_difference: What is compared with eager, and what follows where a
            program does not compile, is slower, or differs later on; see ``trainer.settings.Config``.

    Raises:
        ValueError: Strategies that conflict, or options that this machine or module does not have.
        CompiledNothing, CompileFailed, ParityError, RecompileError: Where an option asks for it.
    """

    failures: Failures | None = None
    """Of the processes that train together."""
    _deadline: Deadline | None = None
    _epoch_ends: EpochEnds | None = None
    _sigterm: SigtermAgreement | None = None
    failed_by: BaseException | None = None
    """What ended the training; what is behind an error, where that is another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, by ``copy`` or ``pickle``, has the same settings, and nothing of a training: libraries copy the
        callbacks that they are given."""
        return functools.partial(type(self), **{**self._given.arguments, "record": None}), ()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the strategies once the module's own ``setup`` and ``configure_model`` have built what is compiled."""
        if sum(isinstance(one, Compile) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "a Trainer takes one Compile callback: give it all strategies, Compile([Regional(), Cached()])"
            )
        if trainer.world_size > 1:
            self._compare_processes(trainer, pl_module)
            if stage == "fit":  # under an owner too, whose own handlers come with the first step
                self._settings.enter_context(sigterm_kept(trainer))
                self._sigterm = SigtermAgreement(trainer)
        # Before weights are sharded or wrapped, Lightning has no hook of a callback that comes after those two.
        undo = self._settings.enter_context(contextlib.ExitStack())

        def set_up(given: L.Trainer) -> None:
            undo.close()
            self._apply(trainer, pl_module, trains=stage == "fit")
            trainer.strategy.setup(given)

        undo.enter_context(replaced(trainer.strategy, "setup", set_up))

    def _apply(self, trainer: L.Trainer, module: L.LightningModule, *, trains: bool) -> None:
        """Apply the strategies, once; their settings hold until ``teardown``."""
        bar = trainer.progress_bar_callback
        program = self.apply_to(
            module,
            device=trainer.strategy.root_device,
            precision=str(trainer.precision),
            sharded=isinstance(trainer.strategy, lightning_classes(FSDPStrategy, ModelParallelStrategy)),
            # A call under FSDP gathers parameters from all.
            compared=not isinstance(trainer.strategy, lightning_classes(FSDPStrategy)),
            trains=trains,
            print_line=None if not trainer.is_global_zero else print if bar is None else bar.print,
        )
        if program.padding is not None:
            from trainer.bucketed_loaders import padded_loaders

            with speaking_python(self._in_script):
                self._settings.enter_context(padded_loaders(trainer, program))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Model, optimizer and restored state are in place."""
        if trainer.world_size > 1:
            self._epoch_ends = epoch_ends(trainer)
        self.begin(LightningLoop(trainer), training_info_of(trainer))
        several = trainer.world_size > 1
        captures = several and any(one.captures_step for one in self.program.strategies)  # type: ignore[union-attr]
        self._deadline = Deadline(
            trainer.global_rank,
            group_timeout().total_seconds() if several else math.inf,
            captures=captures and trainer.strategy.root_device.type == "cuda",
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._deadline is not None:
            self._deadline.batch_begins(trainer.global_step)
        if self._epoch_ends is not None:
            self._epoch_ends.batch_begins()
        self.batch_begins(batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._epoch_ends is not None:
            self._epoch_ends.batch_ends()
        # Automatic optimization hands over {"loss": <detached clone divided by the micro-batches of a step>}.
        self.batch_ends(outputs.get("loss") if isinstance(outputs, dict) else outputs, batch)
        if self._deadline is not None:
            self._deadline.batch_ends()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epoch_ends is not None:
            self._epoch_ends.epoch_ends()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation is not part of any step."""
        if trainer.state.fn == "fit":
            self.pause("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Its shapes have all come."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.evaluation_over()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._deadline is not None:
            self._deadline.batch_begins(trainer.global_step)
        self.evaluation_begins(batch)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(self, *_: Any) -> None:
        """Validation within a training is guarded, too."""
        self.evaluation_ends()

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is not part of any step."""
        self.pause("saving")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._sigterm is not None:
            self._sigterm.wait()
        self.finish()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The training has failed; Lightning calls no teardown then."""
        self.failed_by = exception
        if self.failures is not None:
            self.failed_by = self.failures.root_cause(exception)
            leave_groups()  # the others may be in a collective; their launcher has to see that this process has ended
        self._end_deadline()
        self.fail(self.failed_by)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.close()
        self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.end()
            self._deadline = None

    def _compare_processes(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raises ValueError, in all processes alike, where they are not."""
        facts = {
            "torch": str(torch.__version__),
            "Lightning": L.__version__,
            "strategies": label(self.strategies),
            "to continue from": str(trainer.ckpt_path),
            "parameters": str(sum(one.numel() for one in module.parameters() if not is_lazy(one))),
            **code_of(module),
            # Not paths, which may lead to a disk of each host's own.
            **{name: str(value) for name, value in flatten(self.record.config) if "/" not in str(value)},
        }
        self.failures = Failures(trainer.global_rank)
        compare_facts(trainer.global_rank, facts)


def training_info_of(trainer: L.Trainer) -> TrainingInfo:
    """Where ``trainer`` logs, and those of its options that a step depends on."""
    given = getattr(trainer.logger, "log_dir", None)
    own = isinstance(given, str | Path)  # loggers of services know one folder for all runs, if any
    folder = Path(given) if own else Path(trainer.default_root_dir) / SHARED_FOLDER  # type: ignore[arg-type]
    loader: Any = trainer.train_dataloader
    sizes = {getattr(loader, "batch_size", None)} - {None}
    if not sizes:  # one for each length, where batches are grouped by it
        sizes = set((getattr(getattr(loader, "batch_sampler", None), "batch_sizes", None) or {}).values())
    return TrainingInfo(
        folder=None if trainer.fast_dev_run else folder,  # type: ignore[attr-defined]
        shared=not own,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        settings={
            "strategy": type(trainer.strategy).__name__,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "max_steps": trainer.max_steps,
        },
        seed=int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
        resumed_from=None if trainer.ckpt_path is None else str(trainer.ckpt_path),
    )
