"""Inference and checkpointing on a CUDA device: events as clock, graphs of both kinds, a measured peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.inferences import infer
from tests.trainer.runs import curve, relative_differences, train

pytestmark = pytest.mark.gpu
ON_GPU = ("trainer.accelerator=gpu", "trainer.precision=bf16-mixed", "parity=on")


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("eager", ()),
        ("regional", ("compile.regional.backend=inductor",)),
        ("whole", ("compile.whole.backend=inductor", "compile.whole.mode=reduce-overhead")),
        ("cuda_graph", ()),
        ("[regional,cuda_graph]", ("compile.regional.backend=inductor",)),
    ],
)
def test_an_inference_is_measured_on_the_device(strategy: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    record = infer(tmp_path, *ON_GPU, *changes, strategy=strategy)
    assert (record.status, record.reason) == ("finished", None)
    assert record.peak_teraflops_measured is not None
    assert record.peak_device_memory_gib is not None
    assert record.matrix_precision == "bf16"
    if strategy != "eager":
        assert record.report["parity"]["verdict"] == "passed"
    if "cuda_graph" in strategy:
        assert record.report["cuda_graph"]["replayed_steps"] >= 8


@pytest.mark.parametrize(
    "strategy", ["checkpointing", "[checkpointing,cuda_graph]", "[checkpointing,regional,cuda_graph]"]
)
def test_checkpointed_steps_have_eagers_losses_captured_or_not(strategy: str, tmp_path: Path) -> None:
    changes = ("trainer.accelerator=gpu", "trainer.max_steps=8")
    train(tmp_path / "eager", *changes)
    record = train(tmp_path / "run", *changes, strategy=strategy)
    assert record.status == "finished"
    if "cuda_graph" in strategy:
        assert record.report["cuda_graph"]["graphs"] > 0
    assert max(relative_differences(curve(tmp_path / "run"), curve(tmp_path / "eager"))) < 1e-3


def test_a_checkpointed_block_with_dropout_is_not_captured_uncompiled(tmp_path: Path) -> None:
    changes = ("trainer.accelerator=gpu", "trainer.max_steps=6", "task.size.dropout=0.1")
    record = train(tmp_path, *changes, strategy="[checkpointing,cuda_graph]")
    assert record.status == "finished"
    assert any("draws random numbers" in reason for reason in record.report["cuda_graph"]["refused"])


def test_a_scaler_clips_a_fused_optimizer(tmp_path: Path) -> None:
    record = train(tmp_path, "trainer.accelerator=gpu", "trainer.precision=16-mixed", strategy="cuda_graph")
    assert (record.status, record.precision, record.matrix_precision) == ("finished", "16-mixed", "fp16")
