"""Networks with batch norm: the running statistics are buffers that every step changes, and only training steps may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import curve, last_checkpoint, relative_differences, train


@pytest.mark.parametrize(("model", "strategy"), [("timm/test_resnet", "whole"), ("resnet18", "regional")])
def test_preflight_and_comparison_leave_running_statistics_as_eagers(model: str, strategy: str, tmp_path: Path) -> None:
    changes = (f"task.model={model}", "task.image_size=32", "task.data.batch_size=4")
    backend = "aot_eager" if strategy == "whole" else "eager"
    record = train(tmp_path / strategy, *changes, task="image_classification", strategy=strategy, backend=backend)
    train(tmp_path / "eager", *changes, task="image_classification")
    assert record.report["parity"]["verdict"] == "passed"
    assert max(relative_differences(*(curve(tmp_path / arm) for arm in (strategy, "eager")))) < 1e-4
    compiled, eager = (last_checkpoint(tmp_path / arm)["state_dict"] for arm in (strategy, "eager"))
    assert list(compiled) == list(eager)
    statistics = [name for name in eager if "running_" in name or "num_batches" in name]
    assert statistics
    for name in statistics:
        torch.testing.assert_close(compiled[name], eager[name], rtol=1e-3, atol=1e-4)
    assert {int(eager[name]) for name in statistics if "num_batches" in name} == {record.steps}
    if model == "resnet18":
        assert "regional: BasicBlock of several sizes, each compiled for its own" in " ".join(record.notes)
