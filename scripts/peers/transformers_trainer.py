"""Peer: transformers' own ``Trainer`` on transformers' own network of the task's sizes, with the task's batches.

``transformers_eager``, and ``transformers_compiled``: ``TrainingArguments(torch_compile=True)`` compiles the model with
its loss as one. https://huggingface.co/docs/transformers/perf_torch_compile
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import transformers
from torch import Tensor, distributed

from scripts.peers.work import Work
from tasks.base import Task
from tasks.language.task import BertNetwork, Gpt2Network
from tasks.special_tokens import IGNORED, PAD


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


def train(work: Work, *, compiled: bool = True) -> None:
    build, inputs = matching_network(work.config.task)
    settings, module = work.config.trainer, cast(Any, work.module)
    module.net = network = build()  # optimizer and schedule are the task's, of these parameters
    work.placed()
    optimizer, schedule = work.optimizer_and_schedule()
    arguments = transformers.TrainingArguments(
        output_dir=work.directory,
        max_steps=settings.max_steps,
        per_device_train_batch_size=work.config.task.data.batch_size,  # type: ignore[attr-defined]
        max_grad_norm=settings.gradient_clip_val or 0.0,
        bf16=work.precision == "bf16-mixed",
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
    trainer.add_callback(Measured(work, trainer))
    trainer.train()


class TaskTrainer(transformers.Trainer):
    """Trains on the task's batches, and keeps the loss of the last."""

    batches: Batches
    loss: Tensor

    def get_train_dataloader(self) -> Any:
        return self.batches

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        self.loss = super().training_step(*arguments, **named)
        return self.loss


class Batches:
    """The task's loader as accelerate prepares it; yields what the network takes."""

    def __init__(self, work: Work, inputs: Inputs, accelerator: Any) -> None:
        loader = work.loader()
        self._sampler, self._epoch = loader.sampler, 0
        # Over several processes it is split already.
        self._loader = loader if distributed.is_initialized() else accelerator.prepare(loader)
        self._work, self._inputs = work, inputs

    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls it, as our own loop does."""
        self._sampler.set_epoch(epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self._inputs, self._work.epoch(self._loader, self._epoch))


class Measured(transformers.TrainerCallback):
    """Begins and ends the measuring, and counts the steps."""

    def __init__(self, work: Work, trainer: TaskTrainer) -> None:
        self._work, self._trainer = work, trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._work.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._work.stepped(self._trainer.loss)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._work.telemetry.finish()
