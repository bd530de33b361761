"""A resumed run sees the batches and the losses that the uninterrupted run saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tasks import Task
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Shapes
from tasks.resumable_data import ResumableSampler
from tests.tasks.conftest import fit, opened


def train(task: Task, folder: Path, *, resume: Path | None = None, **options: Any) -> list[tuple[list[Any], float]]:
    """Batches and losses of 12 steps, with a checkpoint after every step in ``folder``."""
    torch.manual_seed(0 if resume is None else 1)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "limit_val_batches": 1, "ckpt_path": resume, **options}
    _, recorder = fit(task, saves, module=task.build_module(max_steps=12), steps=12, **options)
    return list(zip(recorder.batches, recorder.losses, strict=True))


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
        monkeypatch.setattr("tasks.lightning_module.LARGE", 1)
    task = Captioning(size=size, data=Shapes(batch_size=4, train_images=22, val_images=4, num_workers=workers))
    whole = train(task, tmp_path / "a", limit_train_batches=limit)
    assert len(whole) == 12
    for stop in stops:
        checkpoint = tmp_path / "a" / f"step={stop}.ckpt"
        assert train(task, tmp_path / f"b{stop}", resume=checkpoint, limit_train_batches=limit) == whole[stop:], stop
    if len(stops) > 1:
        again = tmp_path / f"b{stops[-1]}" / "step=8.ckpt"
        assert train(task, tmp_path / "c", resume=again) == whole[8:], "a run that is resumed twice"


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
    data = opened(Captioning(size=size, data=Shapes(batch_size=4, train_images=8, val_images=4, num_workers=0)))
    before = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)
