"""Library models: each is built as its library defines it and learns; what a model cannot take is refused."""

from __future__ import annotations

import importlib.machinery

import lightning as L
import pytest
import torch

from tasks.library_model import MASKED, MODELS
from tasks.library_model.data import DISTINCT, loader
from tasks.library_model.model import NETWORKS
from tasks.library_model.task import LibraryModel
from tests.sweep import some
from tests.trainer.lightning_modules import quiet_trainer


def train(task: LibraryModel, steps: int) -> tuple[list[float], L.LightningModule]:
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *arguments: object) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    torch.manual_seed(3)
    module = task.build_module(max_steps=steps)
    quiet_trainer(max_steps=steps, callbacks=[Losses()]).fit(module, datamodule=task.build_data(seed=0))
    return losses, module


def test_each_name_has_a_network_and_no_network_is_unnamed() -> None:
    assert NETWORKS.keys() == MODELS.keys() >= set(MASKED)


@pytest.mark.parametrize("model", some(list(MODELS), every=3))
def test_a_tiny_model_learns_its_few_batches(model: str) -> None:
    losses, module = train(LibraryModel(model=model, tiny=True), 60)
    assert sum(each.numel() for each in module.parameters()) < 200_000
    assert min(losses[-DISTINCT:]) < losses[0]
    assert sum(losses[-DISTINCT:]) < sum(losses[:DISTINCT])


def test_the_same_seed_draws_the_same_weights_and_leaves_the_runs_random_numbers_alone() -> None:
    first, second = (train(LibraryModel(model="lstm", tiny=True), 2)[0] for _ in range(2))
    assert first == second


def test_padded_texts_have_a_mask_and_no_labels_in_the_padding() -> None:
    (batch,) = loader("llama", tiny=True, steps=1, padded=True)
    assert 0 < batch["attention_mask"].sum() < batch["attention_mask"].numel()
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()
    assert "attention_mask" not in next(iter(loader("llama", tiny=True, steps=1)))


def test_a_batch_is_counted_by_its_examples() -> None:
    counts = {
        model: LibraryModel(model=model).count(next(iter(loader(model, tiny=True, steps=1)))).samples
        for model in ("bert", "vit", "gatv2")
    }
    assert counts == {"bert": 2, "vit": 4, "gatv2": 24}


def test_a_missing_library_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, importlib.machinery.ModuleSpec | None] = {"timm": None}
    monkeypatch.setattr("tasks.library_model.task.find_spec", found.get)
    with pytest.raises(ValueError, match=r"task\.model=convnext needs timm, which is not installed: pip install timm"):
        LibraryModel(model="convnext").check()
    LibraryModel(model="unet").check()
