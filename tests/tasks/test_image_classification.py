"""The image classification task: what it trains, validates and predicts, and its named experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.image_classification.task import ImageClassification, LabelledShapes
from tests.tasks.conftest import fit, opened

EXPERIMENTS = Path(__file__).resolve().parents[2] / "conf" / "experiment"


def test_the_network_has_an_output_for_each_class_or_as_many_as_are_asked_for() -> None:
    for asked, outputs in ((None, 30), (1000, 1000)):
        task = ImageClassification(model="timm/test_vit", image_size=32, classes=asked, initialise="host")
        module = task.build_module(max_steps=1)
        batch = next(iter(opened(task).val_dataloader()))
        assert module.net(batch.images).shape == (16, outputs)


def test_it_learns_the_embedded_data_within_a_few_steps() -> None:
    data = LabelledShapes(batch_size=16, train_images=1600, val_images=64, num_workers=0)
    task = ImageClassification(
        model="timm/test_efficientnet", image_size=48, warmup_steps=10, learning_rate=5e-3, data=data
    )
    trainer, _ = fit(task, steps=80, limit_val_batches=None)
    (result,) = trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)
    assert result["val/loss"] < 2.7, "the logarithm of 30 classes is 3.4"
    assert result["val/accuracy"] > 0.12, "chance is 0.03"


def test_networks_without_batch_norm_learn_at_a_lower_rate() -> None:
    rates = []
    for model in ("timm/test_resnet", "timm/test_vit"):
        module = ImageClassification(model=model, image_size=32, warmup_steps=0).build_module(max_steps=10)
        rates.append(module.configure_optimizers()["optimizer"].param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3, 3e-4])


@pytest.mark.parametrize("name", ["alexnet", "resnet50", "vit_l_16"])
def test_an_experiment_is_the_published_network_and_its_smoke_run_trains(name: str) -> None:
    full, smoke = (
        yaml.safe_load((EXPERIMENTS / f"{file}.yaml").read_text())["task"] for file in (name, f"{name}_smoke")
    )
    assert (full["model"], full["image_size"], full["classes"]) == (name, 224, 1000)
    data = LabelledShapes(**{**smoke.pop("data"), "train_images": 4})
    task = ImageClassification(**smoke, data=data, initialise="host")
    module, batch = task.build_module(max_steps=1), next(iter(opened(task).val_dataloader()))
    module.training_step(batch, 0).backward()
    assert all(weight.grad is not None for weight in module.parameters())
    assert task.training_flops(batch) is not None
