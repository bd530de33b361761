"""transformers' own ``Trainer`` on transformers' own network of the task's sizes, with the task's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import transformers
from torch import Tensor, distributed

from strategies.loop_protocol import Loop
from tasks.base import Task
from tasks.language.task import BertNetwork, Gpt2Network
from tasks.special_tokens import IGNORED, PAD
from trainer.build import resolve_precision
from trainer.loops.huggingface import HuggingFaceLoop
from trainer.peers.peer_loops import Measured, PeerLoop, Work, optimizer_and_schedule, placed


def next_token_inputs(batch: Any) -> dict[str, Tensor]:
    """A ``TextBatch`` as GPT2LMHeadModel takes it: targets are shifted already, it reads all but the last."""
    labels_BS = batch.targets.masked_fill(batch.targets == PAD, IGNORED)
    return {"input_ids": batch.inputs, "labels": labels_BS, "shift_labels": labels_BS}


def masked_inputs(batch: Any) -> dict[str, Tensor]:
    """A ``MaskedBatch`` as BertForMaskedLM takes it."""
    mask = {} if batch.mask is None else {"attention_mask": batch.mask}
    return {"input_ids": batch.tokens, "labels": batch.targets, **mask}


Inputs = Callable[[Any], dict[str, Tensor]]
"""The task's batch as keywords of a network's forward."""


def matching_network(task: Task) -> tuple[Callable[[], transformers.PreTrainedModel], Inputs]:
    """What builds transformers' network of the sizes of ``task``'s, with weights that transformers draws, and what it
    is given. Raises ValueError where it has none."""
    network = getattr(task, "network", None)
    if isinstance(network, Gpt2Network):
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), network.dropout)
        gpt2 = transformers.GPT2Config(
            vocab_size=network.vocabulary_size,
            n_positions=network.max_tokens,
            n_embd=network.width,
            n_layer=network.layers,
            n_head=network.heads,
            use_cache=False,
            **dropout,
        )
        return partial(transformers.GPT2LMHeadModel, gpt2), next_token_inputs
    packed = getattr(getattr(task, "data", None), "packing", None) == "packed_documents"  # rows of several documents
    if isinstance(network, BertNetwork) and not packed:
        bert = transformers.BertConfig(
            vocab_size=network.vocabulary_size,
            max_position_embeddings=network.max_tokens,
            hidden_size=network.width,
            intermediate_size=4 * network.width,
            num_hidden_layers=network.layers,
            num_attention_heads=network.heads,
            hidden_dropout_prob=network.dropout,
            attention_probs_dropout_prob=network.dropped_attention,
        )
        return partial(transformers.BertForMaskedLM, bert), masked_inputs
    raise ValueError(
        f"transformers has no network in the place of {task.title}'s: run.peer=transformers_eager and "
        "transformers_compiled take GPT-2 (task=language_modelling) and BERT (task=masked_lm, not its "
        "packed_documents), leave them out here"
    )


def train(work: Work, *, compiled: bool = True) -> Loop:
    """``Trainer(model, TrainingArguments(torch_compile=True)).train()``, which compiles the model with its loss as one.
    https://huggingface.co/docs/transformers/perf_torch_compile"""
    build, inputs = matching_network(work.config.task)
    settings, precision = work.config.trainer, resolve_precision(work.config.trainer)
    module: Any = work.module
    module.net = network = build()  # optimizer and schedule are the task's, of these parameters
    optimizer, schedule = optimizer_and_schedule(placed(module, work.device))
    arguments = transformers.TrainingArguments(
        output_dir=str(work.directory),
        max_steps=settings.max_steps,
        per_device_train_batch_size=work.config.task.data.batch_size,  # type: ignore[attr-defined]
        max_grad_norm=settings.gradient_clip_val or 0.0,
        bf16=precision == "bf16-mixed",
        use_cpu=work.device.type == "cpu",
        logging_steps=settings.log_every_n_steps,
        save_strategy="no",
        seed=work.config.seed,
        remove_unused_columns=False,
        average_tokens_across_devices=False,  # the mean of each process counts alike, as in all other arms
        torch_compile=compiled,
        torch_compile_backend=work.backend if compiled else None,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else it takes all devices that it sees, by DataParallel
    trainer = TaskTrainer(network, arguments, optimizers=(optimizer, schedule))
    trainer.batches = Batches(work, inputs, trainer.accelerator)
    trainer.add_callback(MeasuredTrainer(work, trainer))
    trainer.train()
    return trainer.measured


class TaskTrainer(transformers.Trainer):
    """Trains on the task's batches."""

    batches: Batches
    measured: TrainerLoop

    def get_train_dataloader(self) -> Any:
        return self.batches


class Batches:
    """The task's loader as accelerate prepares it; yields what the network takes, and keeps the batch for the meter."""

    def __init__(self, work: Work, inputs: Inputs, accelerator: Any) -> None:
        loader = work.loader()
        self.set_epoch = loader.sampler.set_epoch  # the Trainer calls it, as our own loop does
        # Over several processes it is split already.
        self.loader = loader if distributed.is_initialized() else accelerator.prepare(loader)
        self._inputs, self.original = inputs, None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.loader:
            self.original = batch
            yield self._inputs(batch)


class TrainerLoop(HuggingFaceLoop):
    """The Trainer's loop for the telemetry, of one process or of several."""

    reduced = PeerLoop.reduced


class MeasuredTrainer(transformers.TrainerCallback):
    """Calls the telemetry where ``trainer.peers.peer_loops.Measured`` does."""

    def __init__(self, work: Work, trainer: TaskTrainer) -> None:
        self._telemetry, self._trainer = work.telemetry, trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        loop = TrainerLoop(self._trainer, cast(Any, Measured(self._telemetry)), None, None)
        if distributed.is_initialized():
            loop.world_size, loop.is_first_process = distributed.get_world_size(), distributed.get_rank() == 0
        self._trainer.measured = loop
        self._telemetry.start(loop)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        loop = self._trainer.measured
        loop.micro_batch_ends()
        self._telemetry.batch_end(loop.loss, self._trainer.batches.original)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._telemetry.finish()
        self._trainer.measured.release()
