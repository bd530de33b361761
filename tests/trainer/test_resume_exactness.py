"""A run stopped by a signal and resumed sees exactly the losses and learning rates of one that was never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.lightning_module import ScoredModule
from tests.trainer.runs import curve, last_checkpoint, train

STEPS, STOP_AT = 12, 6


def send_in_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals, *, times: int = 1) -> None:
    """Send this process a signal in the middle of an optimizer step, once or more often."""
    sent: list[int] = []

    def on_train_batch_start(module: ScoredModule, batch: Any, batch_idx: int) -> None:
        while module.trainer.global_step == step - 1 and len(sent) < times:
            sent.append(step)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ScoredModule, "on_train_batch_start", on_train_batch_start)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("eager", ("task.size.dropout=0.1",)),
        ("eager", ("task.size.dropout=0.1", "trainer.accumulate_grad_batches=2")),
        ("eager", ("task.size.dropout=0.1", "trainer.val_every_n_steps=4")),
        # Not aot_eager: on torch 2.15 it stumbles over attention with dropout.
        ("regional", ("task.size.dropout=0.1", "compile.regional.backend=eager")),
    ],
    ids=["dropout", "accumulation", "validation", "regional"],
)
def test_stopping_and_going_on_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, changes: tuple[str, ...]
) -> None:
    # Twelve steps are more than an epoch of data, and the schedule ends its warm-up on the way.
    changes = (*changes, f"trainer.max_steps={STEPS}", "task.data.train_images=20", "task.warmup_steps=4")
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    assert train(whole, *changes, strategy=strategy).status == "finished"
    with monkeypatch.context() as patch:
        send_in_step(patch, STOP_AT, signal.SIGINT)
        stopped = train(first, *changes, strategy=strategy)
    assert (stopped.status, stopped.signal, stopped.exit_code) == ("interrupted", signal.SIGINT, 130)
    assert stopped.steps == STOP_AT
    assert last_checkpoint(first)["global_step"] == STOP_AT
    resumed = train(second, *changes, f"resume={first}", strategy=strategy)
    assert (resumed.status, resumed.steps) == ("finished", STEPS)
    for key in ("train/loss", "train/learning_rate"):
        assert {**curve(first, key), **curve(second, key)} == curve(whole, key)
    assert list(curve(second)) == list(range(STOP_AT + 1, STEPS + 1))
    weights, went_on = (last_checkpoint(run_dir)["state_dict"] for run_dir in (whole, second))
    torch.testing.assert_close(went_on, weights, rtol=0, atol=0)
