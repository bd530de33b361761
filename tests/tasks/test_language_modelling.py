"""The language-modelling task under Lightning: where weights are drawn, what validation says, resuming, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from strategies import Optimizer, Regional
from tasks.language.data import TextBatch
from tasks.language.model import LanguageModel
from tasks.language.networks import Gpt2Network, LanguageNetwork, LlamaNetwork
from tasks.language.sources import Stdlib, TextData
from tasks.language.task import LanguageModelling
from trainer.callback import Compile

LLAMA = LlamaNetwork(
    layers=2, width=16, heads=2, key_value_heads=1, hidden_width=32, vocabulary_size=300, max_tokens=16
)
GPT2 = Gpt2Network(layers=2, width=16, heads=2, vocabulary_size=300, max_tokens=16)


def task_of(network: LanguageNetwork = LLAMA, **options: Any) -> LanguageModelling:
    options.setdefault("data", Stdlib(batch_size=4, max_documents=24, max_tokens=16))
    return LanguageModelling(network=network, warmup_steps=0, **options)


class Losses(L.Callback):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def fit(
    task: LanguageModelling, *callbacks: L.Callback, steps: int = 4, resume: Path | None = None, seed: int = 0
) -> tuple[LanguageModel, list[float]]:
    L.seed_everything(seed, verbose=False)
    module, data = task.build_module(max_steps=steps), task.build_data(seed=0)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        callbacks=[losses, *callbacks],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=2,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    assert isinstance(module, LanguageModel)
    return module, losses.values


def test_the_plain_bases_stand_for_the_embedded_text_and_the_smallest_network() -> None:
    task = LanguageModelling(data=TextData(batch_size=3))
    assert (task.data, task.network) == (Stdlib(batch_size=3), Gpt2Network())


def test_options_at_odds_with_the_network_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^task\.data\.max_tokens=17 must be at most the 16 positions of the network$"
    ):
        task_of(data=Stdlib(max_tokens=17))
    with pytest.raises(ValueError, match=r"^task\.initialise='gpu' is not one of"):
        task_of(initialise="gpu")
    with pytest.raises(
        ValueError, match=r"^task\.network\.heads=4 must be a multiple of task\.network\.key_value_head"
    ):
        LlamaNetwork(heads=4, key_value_heads=3)


@pytest.mark.parametrize("network", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_weights_drawn_on_the_device_are_those_of_the_seed(network: LanguageNetwork) -> None:
    L.seed_everything(3, verbose=False)
    before = torch.get_rng_state()
    module = task_of(network, initialise="device").build_module(max_steps=4)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), before), "drawn later, whatever was drawn meanwhile"
    first, first_losses = fit(task_of(network, initialise="device"), seed=3)
    _, second_losses = fit(task_of(network, initialise="device"), seed=3)
    host, host_losses = fit(task_of(network), seed=3)
    _, other_losses = fit(task_of(network, initialise="device"), seed=4)
    assert first_losses == second_losses == host_losses != other_losses
    assert list(first.state_dict()) == list(host.state_dict())
    for one, other in zip(first.parameters(), host.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sum(p.numel() for p in first.parameters()) == sum(p.numel() for p in host.parameters()), (
        "tied weights stay so"
    )


def test_a_run_with_weights_drawn_on_the_device_resumes_exactly(tmp_path: Path) -> None:
    task = task_of(initialise="device")
    first, second = (
        ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=2, save_top_k=-1) for name in "ab"
    )
    _, whole = fit(task, first, steps=6)
    _, rest = fit(task, second, steps=6, resume=tmp_path / "a" / "step=2.ckpt", seed=1)
    assert rest == whole[2:]


def test_strategies_apply_before_the_weights_are_there() -> None:
    declared = task_of().declare()
    compile_ = Compile(
        [Regional(backend="aot_eager"), Optimizer(backend="aot_eager")],
        whole=declared.whole,
        blocks=declared.blocks,
        parts=declared.parts,
        save=False,
    )
    torch._dynamo.reset()
    _, losses = fit(task_of(initialise="device"), compile_)
    _, eager = fit(task_of(initialise="device"))
    assert losses == pytest.approx(eager, rel=1e-5)
    assert (compile_.record.regions, compile_.record.regions_compiled, compile_.record.graph_breaks) == (3, 3, 0)
    torch._dynamo.reset()


def test_a_large_networks_gradients_are_freed_as_soon_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            held.append(any(parameter.grad is not None for parameter in module.parameters()))

    _, small = fit(task_of(), Watch(), steps=3)
    assert held == [False, True, True]
    held.clear()
    monkeypatch.setattr("tasks.module.LARGE", 1)
    _, large = fit(task_of(), Watch(), steps=3)
    assert held == [False, False, False]
    assert large == small


def test_validation_is_the_exact_mean_over_targets() -> None:
    data = Stdlib(batch_size=4, max_documents=30, max_tokens=16, packing="documents", val_share=0.3)
    task = task_of(data=data)
    module, _ = fit(task, steps=2)
    loader = task.build_data(seed=0)
    loader.setup()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (result,) = trainer.validate(module, datamodule=loader, verbose=False)
    module.eval()
    with torch.no_grad():
        scores = [module.net(batch.inputs, batch.targets) for batch in loader.val_dataloader()]
    count = sum(int(count) for *_, count in scores)
    assert len(scores) > 1
    assert result["val/loss"] == pytest.approx(sum(float(loss) * int(n) for loss, _, n in scores) / count, rel=1e-5)
    assert result["val/token_accuracy"] == pytest.approx(sum(int(correct) for _, correct, _ in scores) / count)


def test_a_batch_is_counted_and_predicted() -> None:
    task = task_of(GPT2, initialise="host")
    batch = TextBatch(torch.tensor([[1, 5, 6, 2, 0], [1, 5, 6, 7, 2]]), 7)
    counts = task.count(batch)
    assert (counts.samples, counts.tokens, counts.useful_tokens) == (2, 8, 7)
    assert (batch.targets != 0).sum() == 7
    assert (
        task.training_flops(batch)
        == 3 * task.inference_flops(batch)
        == task.count_flops(rows=2, positions=4, training=True)
    )
    module = task.build_module(max_steps=1).eval()
    assert module.predict_step(batch, 0).shape == (2, 4, 300)


def test_only_documents_are_declared_ragged() -> None:
    assert task_of().declare().ragged == ()
    assert task_of(data=Stdlib(packing="documents")).declare().ragged == (("tokens", 1, 0, 1),)


def test_it_learns_the_embedded_text_within_a_few_steps() -> None:
    network = Gpt2Network(layers=2, width=32, heads=2, vocabulary_size=300, max_tokens=32)
    _, losses = fit(task_of(network, data=Stdlib(batch_size=8, max_documents=64)), steps=60)
    assert losses[0] == pytest.approx(5.7, abs=0.4), "the logarithm of the vocabulary"
    assert sum(losses[-5:]) / 5 < 4.0
