"""One inference, from configuration to record: the counterpart of ``trainer.run.Training``."""

from __future__ import annotations

import dataclasses
import warnings
from typing import cast

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from strategies.compose import begin
from trainer.build import batch_counter, callback_arguments, lightning_trainer, require_memory_of
from trainer.callback import Compile
from trainer.checkpoints import WEIGHTS, find_checkpoint, step_of
from trainer.console import ProgressView, announce
from trainer.guards import Guarding
from trainer.guards.guards import Guards
from trainer.inference.loop import InferenceLoop, loader_name
from trainer.loops.lightning import LightningLoop
from trainer.loops.training import note_machine
from trainer.process import StopRequest
from trainer.run import Job
from trainer.settings import Inference
from trainer.telemetry.inference import InferenceTelemetry
from trainer.telemetry.record import AuditFacts
from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages


class Inferring(Job):
    """The parts of one inference."""

    def go(self, stop: StopRequest) -> None:
        """Build everything and measure to the end, to an error or to a stop."""
        config, record, mode = self._config, self._record, self._config.run
        assert isinstance(mode, Inference)
        self._stop = stop
        checkpoint = None if config.resume is None else find_checkpoint(config.resume)
        if checkpoint is not None:
            step_of(checkpoint, parts=WEIGHTS)  # refuses a file that is no checkpoint
            record.resumed_from = str(checkpoint.resolve())
        compile_ = self._compile = CompileForInference(
            **callback_arguments(config, record), count=batch_counter(config.task, config.task.inference_flops)
        )
        L.seed_everything(config.seed, verbose=False)
        # No checkpoints, and a loop of our own.
        trainer = lightning_trainer(config, self._run_dir, callbacks=[compile_], enable_checkpointing=False)
        note_machine(record, LightningLoop(trainer))
        announce(self._console, record, self._run_dir)
        with ProgressView(
            self._console,
            style=config.trainer.progress,
            total=mode.batches * mode.repeats,
            telemetry=lambda: compile_.telemetry,
        ):
            data = config.task.build_data(seed=config.seed)
            module = config.task.build_module(max_steps=config.trainer.max_steps)
            require_step(module, mode.step)
            require_memory_of(module, trainer, record.command, trains=False)
            loop = InferenceLoop(mode, trainer, compile_, count=compile_.telemetry.count, stop=stop)
            # Data modules open the set that the stage is for, and Lightning asks for a validation step where it
            # validates.
            validates = loader_name(data) == "val_dataloader" and is_overridden("validation_step", module)
            # Attributes of these objects, because Lightning offers no way to bring a loop of one's own.
            trainer.predict_loop.run = trainer.validate_loop.run = loop.run  # type: ignore[method-assign]
            try:
                with self._loading(checkpoint), warnings.catch_warnings():
                    # Only the weights are taken from it.
                    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
                    if validates:
                        trainer.validate(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
                    else:
                        trainer.predict(module, datamodule=data, ckpt_path=checkpoint, return_predictions=False)
            finally:
                record.skipped_items = config.task.skipped_items(data)


def require_step(module: L.LightningModule, step: str) -> None:
    """Raise ValueError when ``module`` does not define what is to be run."""
    name = f"{step}_step"
    if is_overridden(name, module) or (step == "predict" and is_overridden("forward", module)):
        return
    other = "validation" if step == "predict" else "predict"
    hint = f"; run.step={other} runs its {other}_step" if is_overridden(f"{other}_step", module) else ""
    raise ValueError(f"run.step={step}: {type(module).__name__} defines no {name}{hint}")


class CompileForInference(Compile):
    """``Compile`` whose owner is the inference loop instead of Lightning's training loop."""

    _stages = ("predict", "validate")

    def _new_telemetry(self) -> Telemetry:
        # Of which the core and the guards use what both kinds have.
        return cast(Telemetry, InferenceTelemetry(**{k: self._measured[k] for k in ("count", "measure_peak")}))

    def begin_inference(self, loop: LightningLoop) -> Guards:
        """Model and weights are in place; returns the guards."""
        assert self.program is not None
        begin(self.strategies, self.program)
        self.log_notes()
        self._loop, self._pages = loop, TensorBoardPages(loop)
        self._pages.begin(self.record)
        if self.strategies and self.guarding.parity != "off":
            self.record.audits = AuditFacts(verdict="not audited", reason="nothing is trained")
        self.telemetry.start(loop, self._pages)
        guarding = dataclasses.replace(self.guarding, on_compile_error="fail")  # the loop rolls back
        self._guards = Guards(guarding, loop, self.program, self.telemetry, self.record, chances=1)
        return self._guards

    @property
    def guarding(self) -> Guarding:
        """What is asked for where the compiled forward is not eager's."""
        return self._guarding

    def log_notes(self) -> None:
        """Pass on what the strategies have noted since the last time."""
        assert self.program is not None
        self._log_notes(self.program)
