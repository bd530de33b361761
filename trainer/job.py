"""Job: the parts of one training, from data to the end of ``fit``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from strategies.compile_errors import one_line
from trainer.build import build_trainer, compile_callback, require_memory_of, start_processes
from trainer.callback import Compile
from trainer.checkpoint_files import find_checkpoint
from trainer.checkpoints import Checkpoints, FiniteLosses, Resuming, open_checkpoint
from trainer.console import ProgressView, announce
from trainer.loops.lightning import LightningLoop
from trainer.loops.lightning_internals import leave_groups
from trainer.loops.rank_failures import StartedProcesses
from trainer.process import StopRequest
from trainer.settings import Config
from trainer.telemetry.hardware import note_machine
from trainer.telemetry.record import RunRecord


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
                        f"resume={config.resume}: the checkpoint belongs to another model than this: {one_line(error)}"
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
