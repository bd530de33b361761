"""Checkpointing and gradient scaling on a CUDA device, captured or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import curve, relative_differences, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["checkpointing", "[checkpointing,regional,cuda_graph]"])
def test_checkpointed_steps_have_eagers_losses_captured_or_not(strategy: str, tmp_path: Path) -> None:
    changes = ("trainer.accelerator=gpu", "trainer.max_steps=8")
    train(tmp_path / "eager", *changes)
    record = train(tmp_path / "run", *changes, strategy=strategy)
    assert record.status == "finished"
    if "cuda_graph" in strategy:
        assert record.report["cuda_graph"]["graphs"] > 0
    assert max(relative_differences(curve(tmp_path / "run"), curve(tmp_path / "eager"))) < 1e-3


def test_a_checkpointed_block_is_not_captured_uncompiled(tmp_path: Path) -> None:
    record = train(tmp_path, "trainer.accelerator=gpu", "trainer.max_steps=6", strategy="[checkpointing,cuda_graph]")
    assert record.status == "finished"
    assert record.report["cuda_graph"]["graphs"] == 0
    assert any("runs eager, and torch cannot repeat" in reason for reason in record.report["cuda_graph"]["refused"])


def test_a_scaler_clips_a_fused_optimizer(tmp_path: Path) -> None:
    record = train(tmp_path, "trainer.accelerator=gpu", "trainer.precision=16-mixed", strategy="cuda_graph")
    assert (record.status, record.precision, record.matrix_precision) == ("finished", "16-mixed", "fp16")
