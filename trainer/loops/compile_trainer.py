"""One line by which a script of Hugging Face's ``transformers.Trainer`` trains under strategies.

    compile_trainer(trainer, [Regional()])
    trainer.train()

It binds the core, ``trainer.loops.training``, to the Trainer's callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import transformers
from tqdm.auto import tqdm
from transformers.trainer_utils import get_last_checkpoint

from strategies import Stage, Strategy
from trainer.loops.huggingface import CAPTURES, HuggingFaceLoop, precision_of
from trainer.loops.training import CompiledTraining, Logs

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
        loop = HuggingFaceLoop(self._trainer, self.batch_begins, self._resumed_from, program.padding)
        self._hugging_face = loop
        logs = Logs(
            folder=Path(args.output_dir),
            batch_size=args.per_device_train_batch_size,
            settings={name: getattr(args, name) for name in WORKLOAD},
            resumed_from=self._resumed_from,
            seed=args.seed,
        )
        self.begin(loop, logs)
        if args.eval_on_start:
            self.pause("validating")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hugging_face.epoch_begins()

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

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mark_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint may follow an evaluation."""
        if self._trainer.is_in_train and control.should_save:
            self.pause("saving")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hugging_face.saved()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.finish()


def refusals(trainer: Any, strategies: Sequence[Strategy]) -> list[str]:
    """What of strategies, arguments and model cannot be combined, a line each."""
    args, model = trainer.args, trainer.model
    found = {
        "args.torch_compile=True compiles the model as a whole already: leave it out, and use Whole()": (
            args.torch_compile
        ),
        "args.auto_find_batch_size=True begins anew within a training: set a batch size": args.auto_find_batch_size,
        "DeepSpeed, FSDP and tensor parallelism shard what a step has to be copied from; train on one device": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or getattr(trainer, "is_tp_enabled", False)
        ),
        "several processes or devices: not supported yet; start one process, CUDA_VISIBLE_DEVICES=0": (
            args.world_size > 1 or args.n_gpu > 1 or trainer.is_model_parallel
        ),
        "the model is compiled already (torch.compile(model) or model.compile()): hand over the plain model": (
            model is not None
            and any(one._compiled_call_impl is not None or hasattr(one, "_orig_mod") for one in model.modules())
        ),
    }
    for strategy in strategies:
        found[f"{strategy.name} captures whole steps: {CAPTURES}"] = strategy.captures_step
        found[f"{strategy.name} groups and pads batches: {LOADERS}"] = strategy.reorders_data
        found[f"{strategy.name} with args.fp16: accelerate keeps the optimizer's own step; use args.bf16"] = (
            strategy.stage is Stage.OPTIMIZER and args.fp16
        )
    return [f"compile_trainer: {line}" for line, refused in found.items() if refused]
