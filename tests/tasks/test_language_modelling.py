"""The language-modelling task under Lightning: options, gradients, batches, that it learns."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from tasks.language.data import TextBatch
from tasks.language.sources import Stdlib
from tasks.language.task import Gpt2Network, LanguageModelling, LanguageNetwork, LlamaNetwork
from tests.tasks.conftest import fit

LLAMA = LlamaNetwork(
    layers=2, width=16, heads=2, key_value_heads=1, hidden_width=32, vocabulary_size=300, max_tokens=16
)
GPT2 = Gpt2Network(layers=2, width=16, heads=2, vocabulary_size=300, max_tokens=16)


def task_of(network: LanguageNetwork = LLAMA, **options: Any) -> LanguageModelling:
    options.setdefault("data", Stdlib(batch_size=4, max_documents=24, max_tokens=16))
    return LanguageModelling(network=network, warmup_steps=0, **options)


def test_a_large_networks_gradients_are_freed_as_soon_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            held.append(any(parameter.grad is not None for parameter in module.parameters()))

    _, small = fit(task_of(), Watch(), steps=3)
    assert held == [False, True, True]
    held.clear()
    monkeypatch.setattr("tasks.lightning_module.LARGE", 1)
    _, large = fit(task_of(), Watch(), steps=3)
    assert held == [False, False, False]
    assert large.losses == small.losses


def test_a_batch_is_counted_and_predicted() -> None:
    task = task_of(GPT2, initialise="host")
    batch = TextBatch(torch.tensor([[1, 5, 6, 2, 0], [1, 5, 6, 7, 2]]), 7)
    counts = task.count(batch)
    assert (counts.samples, counts.tokens, counts.useful_tokens) == (2, 8, 7)
    assert (batch.targets != 0).sum() == 7


def test_only_documents_are_declared_ragged() -> None:
    assert task_of().declare().ragged == ()
    assert task_of(data=Stdlib(packing="documents")).declare().ragged == (("tokens", 1, 0, 1),)


def test_it_learns_the_embedded_text_within_a_few_steps() -> None:
    network = Gpt2Network(layers=2, width=32, heads=2, vocabulary_size=300, max_tokens=32)
    losses = fit(task_of(network, data=Stdlib(batch_size=8, max_documents=64)), steps=60)[1].losses
    assert losses[0] == pytest.approx(5.7, abs=0.4), "the logarithm of the vocabulary"
    assert sum(losses[-5:]) / 5 < 4.0
