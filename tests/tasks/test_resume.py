"""A resumed run sees the batches and the losses that the uninterrupted run saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tasks.captioning.task import CaptionerSize, Captioning, Shapes
from tasks.loading import ResumableSampler
from tests.trainer.lightning_modules import quiet_trainer


class Recorder(L.Callback):
    """Keeps the tokens and the loss of every training step."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[list[int]], float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((batch.tokens.tolist(), float(outputs["loss"])))


def train(
    size: CaptionerSize,
    folder: Path,
    *,
    workers: int,
    resume: Path | None = None,
    limit: int | None = None,
) -> Recorder:
    """Train 12 steps, 5 to an epoch (or ``limit``), with a checkpoint after every step."""
    torch.manual_seed(0 if resume is None else 1)
    data = Shapes(batch_size=4, train_images=22, val_images=4, num_workers=workers)
    task = Captioning(size=size, data=data)
    recorder = Recorder()
    trainer = quiet_trainer(
        enable_checkpointing=True,
        max_steps=12,
        max_epochs=-1,
        callbacks=[recorder, ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        num_sanity_val_steps=0,
        limit_val_batches=1,
        limit_train_batches=limit,
    )
    trainer.fit(
        task.build_module(max_steps=12), datamodule=task.build_data(seed=3), ckpt_path=str(resume) if resume else None
    )
    return recorder


@pytest.mark.parametrize(
    ("workers", "limit", "stops", "on_device"),
    [(0, None, (2, 5), False), (1, None, (7,), True), (0, 3, (6,), False)],
    ids=["within and after an epoch", "a worker, weights drawn on the device", "after a short epoch"],
)
def test_a_resumed_run_continues_with_the_same_batches_and_losses(
    size: CaptionerSize, tmp_path: Path, workers: int, limit: int | None, stops: tuple[int, ...], on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if on_device:
        monkeypatch.setattr("tasks.module.LARGE", 1)
    options: dict[str, Any] = {"workers": workers, "limit": limit}
    whole = train(size, tmp_path / "a", **options).steps
    assert len(whole) == 12
    for stop in stops:
        resumed = train(size, tmp_path / f"b{stop}", resume=tmp_path / "a" / f"step={stop}.ckpt", **options).steps
        assert resumed == whole[stop:], stop
    if len(stops) > 1:
        again = tmp_path / f"b{stops[-1]}" / "step=8.ckpt"
        assert train(size, tmp_path / "c", resume=again, **options).steps == whole[8:], "a run that is resumed twice"


def sampler(rank: int = 0, replicas: int = 1) -> ResumableSampler:
    return ResumableSampler(list(range(21)), num_replicas=replicas, rank=rank, seed=1, batch_size=4)  # type: ignore[arg-type]


def test_the_order_changes_with_the_epoch_and_skips_only_in_the_resumed_one() -> None:
    whole = sampler()
    first = list(whole)
    whole.set_epoch(1)
    second = list(whole)
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second
    resumed = sampler()
    resumed.resume(epoch=0, batches=2)
    assert list(resumed) == list(resumed) == first[8:]
    assert len(resumed) == 21
    resumed.set_epoch(1)
    assert list(resumed) == second


def test_ranks_share_an_epoch_evenly() -> None:
    parts = [list(sampler(rank, 2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 11
    assert set(parts[0]) | set(parts[1]) == set(range(21))


def test_making_an_iterator_leaves_the_global_generator_alone(size: CaptionerSize) -> None:
    data = Captioning(size=size, data=Shapes(batch_size=4, train_images=8, val_images=4, num_workers=0)).build_data(
        seed=0
    )
    data.setup("fit")
    before = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)
