"""Hugging Face's ``transformers.Trainer``: one line by which its script trains under strategies, and its loop.

    compile_trainer(trainer, [Regional()])
    trainer.train()

The Trainer keeps its own loop. A few methods are replaced on this one object while it trains. ``training_step`` says
that a batch begins, ``get_batch_samples`` that batches are fetched, ``_prepare_inputs`` that they are on the device,
``prediction_step`` that one is evaluated; ``log`` takes figures along. Tried: transformers 5.23, accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.trainer_utils import get_last_checkpoint

from strategies import Stage, Strategy
from strategies.base import Padding
from strategies.loop_protocol import RunMicroBatch
from strategies.padding import length_of, to_edge
from trainer.advice import refuse_unknown
from trainer.loops.compiled_training import CompiledTraining
from trainer.loops.lightning_internals import replace, replaced
from trainer.loops.plain import SingleProcessLoop
from trainer.telemetry.record import TrainingInfo

LOGGED = "speed/"
"""Begins the names of figures that go into the Trainer's own log, which is printed, too; TensorBoard has all."""
CAPTURES = "transformers.Trainer clips and steps the optimizer apart from its training_step"
LOADERS = "transformers.Trainer makes its loaders itself; pad in the collator (pad_to_multiple_of) instead"
WORKLOAD = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "optim", "max_grad_norm")
"""Arguments that a steady step depends on: runs that differ in them are not compared."""


def compile_trainer(
    trainer: transformers.Trainer, strategies: Iterable[Strategy] = (), **options: Any
) -> CompiledTrainer:
    """Let ``trainer.train()`` run under ``strategies``, measured and checked; call it before.

    Args:
        trainer: Of any subclass of ``transformers.Trainer``; its callbacks, arguments and checkpoints stay as they are.
        strategies: What to apply; empty means eager, measured by the same code.
        options: As of ``Compile``. ``whole`` is the model itself and ``count`` reads the batch, if not given.

    Returns:
        The callback that was added to ``trainer``: ``record`` is complete, and saved in ``args.output_dir``, when
        ``trainer.train()`` is over.

    Raises:
        ValueError: Strategies that conflict, and what of strategies, arguments or model cannot be combined.
    """
    refuse_unknown("compile_trainer", options, CompiledTraining)
    compiled = CompiledTrainer(trainer, strategies, **options)
    trainer.add_callback(compiled)
    return compiled


class CompiledTrainer(CompiledTraining, transformers.TrainerCallback):
    """The core bound to one Trainer; made by ``compile_trainer``."""

    def __init__(self, trainer: transformers.Trainer, strategies: Iterable[Strategy], **options: Any) -> None:
        strategies = list(strategies)
        if reasons := refusals(trainer, strategies):
            raise ValueError("\n".join(reasons))
        count = lambda batch: self._hugging_face.count(batch)  # noqa: E731
        super().__init__(strategies, **{"whole": ("",), "count": count, **options})
        self._trainer: Any = trainer
        self._hugging_face: Any = None
        self._train, trainer.train = trainer.train, self.train  # type: ignore[method-assign]

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **named: Any) -> Any:
        """``Trainer.train``; what was measured is kept, and everything given back, however it ends."""
        resumed: Any = resume_from_checkpoint or None
        last: Any = get_last_checkpoint
        self._resumed_from = last(self._trainer.args.output_dir) if resumed is True else resumed
        self._trainer.remove_callback(self)
        self._trainer.add_callback(self)  # last, so that it sees what the others want evaluated or saved
        try:
            return self._train(resume_from_checkpoint, *arguments, **named)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.close()
            if self._hugging_face is not None:
                self._hugging_face.release()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_hyper_param_search:
            raise ValueError("compile_trainer: a hyperparameter search trains several models; train one")
        forward: Any = inspect.unwrap(type(self._trainer.model).forward)
        if "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ()):
            # Which warns at each call, within the model, where it had to guess: a graph would break there.
            self._trainer.model.loss_function = self._trainer.model.loss_function
        program = self.apply_to(
            self._trainer.model, device=args.device, precision=precision_of(self._trainer), print_line=tqdm.write
        )
        loop = HuggingFaceLoop(self._trainer, self, self._resumed_from, program.padding)
        self._hugging_face = loop
        logs = TrainingInfo(
            folder=Path(args.output_dir),
            batch_size=args.per_device_train_batch_size,
            settings={name: getattr(args, name) for name in WORKLOAD},
            entry="compile_trainer",
            resumed_from=self._resumed_from,
            seed=args.seed,
        )
        self.begin(loop, logs)
        if args.eval_on_start:
            self.pause("validating")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Batches are counted anew; of a resumed epoch, those that were trained on before are left out."""
        done, loader = (state.epoch or 0.0) % 1, self._trainer.callback_handler.train_dataloader
        self._hugging_face.batches = round(done * len(loader)) if done and hasattr(loader, "__len__") else 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hugging_face.micro_batch_ends()
        self.batch_ends(self._hugging_face.loss, self._hugging_face.batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_substep_end(args, state, control)
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation or a checkpoint, which comes next, is not part of any step."""
        if control.should_evaluate or control.should_save:
            self.pause("validating" if control.should_evaluate else "saving")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint may follow an evaluation."""
        if self._trainer.is_in_train and control.should_save:
            self.pause("saving")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hugging_face.saved(f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.finish()


def refusals(trainer: Any, strategies: Sequence[Strategy]) -> list[str]:
    """What of strategies, arguments and model cannot be combined, a line each."""
    args = trainer.args
    found = {
        "args.auto_find_batch_size=True begins anew within a training: set a batch size": args.auto_find_batch_size,
        "DeepSpeed, FSDP and tensor parallelism were not tried: train on one device": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or getattr(trainer, "is_tp_enabled", False)
        ),
        "several processes or devices: not supported yet; start one process, CUDA_VISIBLE_DEVICES=0": (
            args.world_size > 1 or args.n_gpu > 1 or trainer.is_model_parallel
        ),
    }
    for strategy in strategies:
        found[f"{strategy.name} captures whole steps: {CAPTURES}"] = strategy.captures_step
        found[f"{strategy.name} groups and pads batches: {LOADERS}"] = strategy.reorders_data
        found[f"{strategy.name} with args.fp16: accelerate keeps the optimizer's own step; use args.bf16"] = (
            strategy.stage is Stage.OPTIMIZER and args.fp16
        )
    return [f"compile_trainer: {line}" for line, refused in found.items() if refused]


class HuggingFaceLoop(SingleProcessLoop):
    """The loop of one ``Trainer.train`` whose model, optimizer and restored state are in place; see ``Loop``.

    ``training`` hears of each batch when it is on the device and before its step. ``padding`` pads and sees each batch,
    of training and evaluation; ``resumed`` is the checkpoint that the training continues from.
    """

    manual = True
    """As under manual optimization, the Trainer itself runs backward and optimizer."""

    def __init__(
        self, trainer: transformers.Trainer, training: CompiledTraining, resumed: str | None, padding: Padding | None
    ) -> None:
        self._trainer = cast(Any, trainer)
        self._resumed, self._padding = resumed, padding
        self._accelerator, self._training = self._trainer.accelerator, training
        args, state = self._trainer.args, self._trainer.state
        self.module, self.device, self.precision = self._trainer.model, args.device, precision_of(trainer)
        # What accelerate has wrapped, for its own steps.
        self.optimizers = (getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer),)
        self.schedulers = (getattr(self._trainer.lr_scheduler, "scheduler", self._trainer.lr_scheduler),)
        self.scaler, self.micro_batches = self._accelerator.scaler, args.gradient_accumulation_steps
        self.steps_planned, self.directory = state.max_steps, args.output_dir
        self.validates = args.eval_strategy != "no" and self._trainer.eval_dataset is not None
        self.log_every_n_steps = max(1, int(state.logging_steps or 500))
        self.batches = 0
        """Of this epoch, so far."""
        self._figures: dict[str, float] = {}
        self._flops = 0.0
        self.saved: Callable[[str], None] = lambda path: None
        """Hears of each checkpoint."""
        self.batch: Any = None
        """The batch under way."""
        self._begun = True
        """Whether ``training`` has heard of it: the Trainer's step prepares it, which may generate it, and once."""
        self._prepares = True
        """Whether it does; a step of the user's own may not."""
        self.loss: Tensor | None = None
        """Its loss, detached and divided by the micro-batches of a step."""
        self._replaced = contextlib.ExitStack()
        take: Any = lambda *replacing: self._replaced.enter_context(replaced(*replacing))  # noqa: E731
        self._step = take(trainer, "training_step", self._training_step)
        self._samples = take(trainer, "get_batch_samples", self._get_batch_samples)
        self._prepare = take(trainer, "_prepare_inputs", self._prepare_inputs)
        self._write_log = take(trainer, "log", self._log)
        self._predict = take(trainer, "prediction_step", self._prediction_step)

    def release(self) -> None:
        self._replaced.close()

    def _training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._flops, self._begun = self._trainer.current_flos, False
        if not self._prepares:
            self._begin(inputs)
        self.loss = self._step(model, inputs, num_items_in_batch)
        if not self._begun:
            self._prepares = False
            self._begin(inputs)
        return self.loss

    def _begin(self, inputs: Any) -> None:
        self.batch, self._begun = dict(inputs) if isinstance(inputs, Mapping) else inputs, True
        self._training.batch_begins(self.batch)

    def _prediction_step(self, model: nn.Module, inputs: Any, *arguments: Any, **named: Any) -> Any:
        self._training.evaluation_begins(inputs)
        try:
            return self._predict(model, inputs, *arguments, **named)
        finally:
            self._training.evaluation_ends()

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs, padding = self._prepare(inputs), self._padding
        if padding is not None:
            inputs = to_edge(inputs, padding.ragged, padding.edge_of(length_of(inputs, padding.ragged)))
        if not self._begun:
            self._begin(inputs)
        return inputs

    def micro_batch_ends(self) -> None:
        """The Trainer is through with the batch and, where it was the last of a step, with the optimizer."""
        self.batches += 1

    def _get_batch_samples(self, epoch_iterator: Any, *arguments: Any, **named: Any) -> Any:
        return self._samples(self.fetched(epoch_iterator), *arguments, **named)

    def _log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        if "loss" in logs:
            logs.update(self._figures)
        self._write_log(logs, *arguments, **named)

    @property
    def steps_done(self) -> int:
        return self._trainer.state.global_step

    @property
    def position(self) -> tuple[int, int]:
        return int(self._trainer.state.epoch or 0), self.batches

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        found = {name: value for entry in self._trainer.state.log_history for name, value in entry.items()}
        kept = {name: value for name, value in found.items() if isinstance(value, int | float)}
        ours = ("step", "epoch", *(name for name in kept if name.startswith(LOGGED)))
        return {name: torch.tensor(value) for name, value in kept.items() if name not in ours}

    @property
    def writer(self) -> Any | None:
        callbacks = self._trainer.callback_handler.callbacks
        return next((found for one in callbacks if (found := getattr(one, "tb_writer", None)) is not None), None)

    def logs(self, name: str) -> bool:
        return False

    def log_figures(self, values: Mapping[str, float], step: int) -> None:
        self._figures.update({name: value for name, value in values.items() if name.startswith(LOGGED)})

    def count(self, batch: Any) -> tuple[int, int | None, int | None, int | None]:
        """Samples, token positions, those that are no padding (where there is an attention mask), and the Trainer's own
        count of floating-point operations, of the batch under way."""
        named = batch if isinstance(batch, Mapping) else {}
        tensors = [one for one in (named.values() if named else batch) if isinstance(one, Tensor) and one.ndim]
        words, mask = named.get("input_ids"), named.get("attention_mask")
        # Only where the Trainer itself has read the loss by now does nobody wait for the device.
        known = self.device.type == "cpu" or self._trainer.args.logging_nan_inf_filter
        useful = int(mask.sum()) if known and isinstance(mask, Tensor) and mask.ndim == 2 else None
        flops = int(self._trainer.current_flos - self._flops)
        return len(tensors[0]) if tensors else 1, None if words is None else words.numel(), useful, flops or None

    def capture_obstacles(self) -> Iterable[str]:
        return (CAPTURES,)

    def wrap_step(self, run: RunMicroBatch) -> Callable[[], None]:
        raise RuntimeError(CAPTURES)

    def around_save(self, saved: Callable[[str], None]) -> Callable[[], None]:
        if self._resumed is not None:
            saved(self._resumed)
        return replace(self, "saved", saved)


def precision_of(trainer: transformers.Trainer) -> str:
    """Lightning's name for the precision that the Trainer's arguments ask for, or that its weights have."""
    args: Any = trainer.args
    if args.bf16 or args.fp16:
        return "bf16-mixed" if args.bf16 else "16-mixed"
    model: Any = trainer.model
    kind = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    return {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float64: "64-true"}.get(kind, "32-true")
