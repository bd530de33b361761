"""The captioning task under Lightning: what validation writes, how it optimises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Shapes
from tests.tasks.conftest import fit, opened


def test_validation_writes_the_exact_mean(size: CaptionerSize, tmp_path: Path) -> None:
    task = Captioning(size=size, data=Shapes(batch_size=8, train_images=16, val_images=13, num_workers=0))
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer, _ = fit(task, steps=2, limit_val_batches=None, logger=logger)
    net = trainer.lightning_module.net.eval()
    with torch.no_grad():
        results = [net(batch.images, batch.tokens) for batch in opened(task).val_dataloader()]
    count = sum(float(count) for _, _, count in results)
    mean = sum(float(loss) * float(count) for loss, _, count in results) / count
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(mean, rel=1e-5)
    accuracy = sum(float(correct) for _, correct, _ in results) / count
    assert float(trainer.callback_metrics["val/token_accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert {"val/loss", "val/token_accuracy"} <= set(events.Tags()["scalars"])


def test_only_matrices_decay_and_the_rate_warms_up_and_falls(size: CaptionerSize) -> None:
    task = Captioning(size=size, learning_rate=0.5, warmup_steps=4)
    settings = task.build_module(max_steps=20).configure_optimizers()
    optimizer, schedule = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    decayed, plain = optimizer.param_groups
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert decayed["weight_decay"] == 0.05
    assert all(parameter.ndim < 2 for parameter in plain["params"])
    assert plain["weight_decay"] == 0.0
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.125)
    assert rates[3] == rates[4] == max(rates) == 0.5
    assert rates[-1] == pytest.approx(0.025)


def test_it_learns_the_embedded_data_within_a_few_steps(size: CaptionerSize) -> None:
    data = Shapes(batch_size=8, train_images=320, val_images=32, num_workers=0, max_objects=2)
    task = Captioning(size=size, data=data, learning_rate=5e-3, warmup_steps=5)
    trainer, _ = fit(task, steps=40, limit_val_batches=None)
    (result,) = trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)
    assert result["val/loss"] < 2.0, "the logarithm of the vocabulary is 5.9"
    assert result["val/token_accuracy"] > 0.4
