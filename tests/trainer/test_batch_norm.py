"""Networks with batch norm: the running statistics are buffers that every step changes, and only training steps may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import curve, last_checkpoint, relative_differences, train
from trainer.telemetry.record import RunRecord


def trained(folder: Path, strategy: str) -> RunRecord:
    changes = ("task.model=timm/test_resnet", "task.image_size=32", "task.data.batch_size=4")
    return train(folder / strategy, *changes, task="image_classification", strategy=strategy, backend="aot_eager")


def test_checks_leave_running_statistics_as_eagers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    trained(tmp_path, "eager")
    eager = last_checkpoint(tmp_path / "eager")["state_dict"]
    statistics = [name for name in eager if "running_" in name or "num_batches" in name]
    assert statistics
    for strategy in ("whole", "regional"):
        record = trained(tmp_path, strategy)
        with subtests.test(strategy=strategy):
            assert record.report["parity"]["verdict"] == "passed"
            assert max(relative_differences(curve(tmp_path / strategy), curve(tmp_path / "eager"))) < 1e-4
            compiled = last_checkpoint(tmp_path / strategy)["state_dict"]
            assert list(compiled) == list(eager)
            for name in statistics:
                torch.testing.assert_close(compiled[name], eager[name], rtol=1e-3, atol=1e-4)
            assert {int(eager[name]) for name in statistics if "num_batches" in name} == {record.steps}
