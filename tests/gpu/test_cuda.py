"""On a CUDA device: clocks by events, bf16 by itself, clipping with a fused optimizer, CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import train
from trainer.telemetry.meter import Step, StepClock
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.gpu
ON_GPU = ("trainer.accelerator=gpu", "trainer.precision=auto", "trainer.deterministic=false")


def test_laps_are_device_time_and_a_mark_leaves_a_pause_out() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    x = (x @ x).clamp(-1, 1)  # cuBLAS is loaded in the first product
    clock, steps = StepClock(torch.device("cuda")), [Step(1), Step(2)]
    clock.mark()
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    clock.lap(steps[0])
    for _ in range(200):
        x = (x @ x).clamp(-1, 1)
    clock.mark()
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    clock.lap(steps[1])
    for step in steps:
        clock.read(step)
    first, second = (step.seconds for step in steps)
    assert clock.ends[1] > first + 5 * second, "the pause is between them"
    assert first > 0
    assert second == pytest.approx(first, rel=0.8)  # ten times as long, had the pause been counted


def test_a_run_uses_bf16_with_a_fused_optimizer_and_clips(tmp_path: Path) -> None:
    train(tmp_path, *ON_GPU, "trainer.gradient_clip_val=0.5", strategy="regional", backend="aot_eager")
    record = RunRecord.load(tmp_path)
    assert record.status == "finished"
    assert record.precision == "bf16-mixed"
    assert record.device_type == "cuda"
    assert record.peak_device_memory_gib > 0


def test_cuda_graphs_train_and_validate_like_eager(tmp_path: Path) -> None:
    validating = ("trainer.max_steps=8", "trainer.val_every_n_steps=4")
    train(tmp_path / "eager", *ON_GPU, *validating, strategy="eager")
    graphed = (*ON_GPU, *validating, "compile.regional.mode=reduce-overhead")
    train(tmp_path / "graphs", *graphed, strategy="regional", backend="inductor")
    eager, graphs = RunRecord.load(tmp_path / "eager"), RunRecord.load(tmp_path / "graphs")
    assert graphs.status == "finished"
    assert graphs.final_loss == pytest.approx(eager.final_loss, rel=0.02)
    assert graphs.final_metrics["val/loss"] == pytest.approx(eager.final_metrics["val/loss"], rel=0.02)


def test_cuda_graphs_are_refused_where_they_lose_gradients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches=2: CUDA graphs"):
        train(
            tmp_path,
            *ON_GPU,
            "trainer.accumulate_grad_batches=2",
            "compile.whole.mode=reduce-overhead",
            strategy="whole",
            backend="inductor",
        )
