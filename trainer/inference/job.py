"""One inference, from configuration to record: the counterpart of ``trainer.run.Training``."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from strategies import Program
from strategies.compose import begin
from trainer.build import batch_counter, callback_arguments, lightning_trainer, require_memory_of
from trainer.callback import Compile
from trainer.checkpoints import WEIGHTS, find_checkpoint, step_of
from trainer.console import ProgressView, announce
from trainer.guards import Guarding
from trainer.inference.loop import InferenceLoop, loader_name
from trainer.loops.lightning import LightningLoop
from trainer.loops.training import ended_in_eager, note_machine
from trainer.process import StopRequest
from trainer.run import Job
from trainer.settings import Config, Inference
from trainer.telemetry.facts import with_idle_share
from trainer.telemetry.inference import InferenceTelemetry
from trainer.telemetry.record import AuditFacts, RunRecord
from trainer.telemetry.tensorboard import TensorBoardPages


class Inferring(Job):
    """The parts of one inference."""

    @property
    def started(self) -> bool:
        """Whether a batch was run."""
        compile_ = self._compile
        return isinstance(compile_, CompileForInference) and compile_.inference_telemetry.phase != "starting"

    def go(self, stop: StopRequest) -> None:
        """Build everything and measure to the end, to an error or to a stop."""
        config, record, mode = self._config, self._record, self._config.run
        assert isinstance(mode, Inference)
        self._stop = stop
        checkpoint = None if config.resume is None else find_checkpoint(config.resume)
        if checkpoint is not None:
            step_of(checkpoint, parts=WEIGHTS)  # refuses a file that is no checkpoint
            record.resumed_from = str(checkpoint.resolve())
        compile_ = self._compile = inference_callback(config, record)
        L.seed_everything(config.seed, verbose=False)
        trainer = build_inference_trainer(config, self._run_dir, compile_)
        note_machine(record, LightningLoop(trainer))
        announce(self._console, record, self._run_dir)
        with ProgressView(
            self._console,
            style=config.trainer.progress,
            total=mode.batches * mode.repeats,
            telemetry=lambda: compile_.inference_telemetry,
        ):
            data = config.task.build_data(seed=config.seed)
            module = config.task.build_module(max_steps=config.trainer.max_steps)
            require_step(module, mode.step)
            require_memory_of(module, trainer, record.command, trains=False)
            loop = InferenceLoop(mode, trainer, compile_, count=compile_.inference_telemetry.count, stop=stop)
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.inference_telemetry = InferenceTelemetry(
            count=self._measured["count"], measure_peak=self._measured["measure_peak"]
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the strategies, and begin to watch the compiler."""
        super().setup(trainer, pl_module, stage)
        self.inference_telemetry.compiler.start()

    @property
    def guarding(self) -> Guarding:
        """What is asked for where the compiled forward is not eager's."""
        return self._guarding

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether Inductor replays what it compiled from CUDA graphs."""
        return self._cuda_graphs

    def begin_inference(self, loop: LightningLoop) -> Program:
        """Model and weights are in place; returns the program."""
        assert self.program is not None
        begin(self.strategies, self.program)
        self._tell(self.program)
        self._pages = TensorBoardPages(loop)
        self._pages.begin(self.record)
        if self.strategies and self._guarding.parity != "off":
            self.record.audits = AuditFacts(verdict="not audited", reason="nothing is trained")
        self.inference_telemetry.start(loop, self._pages)
        return self.program

    def tell(self) -> None:
        """Pass on what the strategies have noted since the last time."""
        assert self.program is not None
        self._tell(self.program)

    def finish_inference(self, *, together: bool) -> None:
        """Fill in the record with what was measured; ``together`` adds the rates of all processes up."""
        telemetry, record = self.inference_telemetry, self.record
        telemetry.phase = "finishing"
        telemetry.compiler.collect()
        telemetry.fill(record, together=together)
        if self.strategies:
            record.take(telemetry.compiler.figures())
            record.events = list(telemetry.compiler.events)
            if self._pages is not None:
                self._pages.events(record.events, telemetry.steps_done)
        if self.program is not None:
            record.report = self.program.report
            record.eager_parts = dict(self.program.eager_parts)
            record.ended_in_eager = ended_in_eager(self.program)
            if "profile" in record.report:
                facts = with_idle_share(record.report["profile"], record.latency_seconds_median)
                record.report["profile"] = facts

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The loop has kept what was measured; undo what must not outlive the run."""
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """The training's core, and the compiler's monitor of the inference."""
        super().close()
        self.inference_telemetry.compiler.stop()


def inference_callback(config: Config, record: RunRecord) -> CompileForInference:
    """The same for a run without training."""
    return CompileForInference(
        **callback_arguments(config, record), count=batch_counter(config.task, config.task.inference_flops)
    )


def build_inference_trainer(config: Config, run_dir: Path, callback: Compile) -> L.Trainer:
    """Lightning's Trainer for a run without training: no checkpoints, and a loop of our own."""
    return lightning_trainer(config, run_dir, callbacks=[callback], enable_checkpointing=False)
