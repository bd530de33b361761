"""One inference, from configuration to record: the counterpart of ``trainer.run.Training``."""

from __future__ import annotations

import warnings

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.build import build_inference_trainer, inference_callback, note_machine, require_memory_of
from trainer.checkpoints import WEIGHTS, find_checkpoint, step_of
from trainer.console import ProgressView, announce
from trainer.inference.batches import loader_name
from trainer.inference.callback import CompileForInference
from trainer.inference.loop import InferenceLoop
from trainer.interrupt import StopRequest
from trainer.job import Job
from trainer.run_modes import Inference


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
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        require_step(module, mode.step)
        require_memory_of(module, trainer, record.command, trains=False)
        note_machine(record, trainer)
        announce(self._console, record, self._run_dir)
        loop = InferenceLoop(
            mode,
            trainer,
            compile_,
            count=compile_.inference_telemetry.count,
            stop=stop,
        )
        # Data modules open the set that the stage is for, and Lightning asks for a validation step where it validates.
        validates = loader_name(data) == "val_dataloader" and is_overridden("validation_step", module)
        # Attributes of these objects, because Lightning offers no way to bring a loop of one's own.
        trainer.predict_loop.run = trainer.validate_loop.run = loop.run  # type: ignore[method-assign]
        total = mode.batches * mode.repeats
        try:
            with (
                self._loading(checkpoint),
                ProgressView(
                    self._console,
                    style=config.trainer.progress,
                    total=total,
                    telemetry=lambda: compile_.inference_telemetry,
                ),
                warnings.catch_warnings(),
            ):
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
