"""A run in the HParams table, without training: what TensorBoard reads of it."""

from __future__ import annotations

from typing import Any

import pytest
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.report.records import record
from trainer.telemetry import tensorboard
from trainer.telemetry.record import RunRecord
from trainer.telemetry.tensorboard import FINAL


def columns_and_values(one: RunRecord) -> tuple[HParamsPluginData, dict[str, Any]]:
    experiment, start = (
        HParamsPluginData.FromString(found.value[0].metadata.plugin_data.content) for found in tensorboard.row(one)[:2]
    )
    values = {
        name: getattr(value, str(value.WhichOneof("kind"))) for name, value in start.session_start_info.hparams.items()
    }
    return experiment, values


def test_every_run_has_the_same_columns_whatever_it_knows() -> None:
    known, _ = columns_and_values(record("whole mode=reduce-overhead", start="cold", round=2))
    little, values = columns_and_values(RunRecord(task="toy"))
    assert known.experiment.hparam_infos == little.experiment.hparam_infos
    assert [info.name.tag for info in known.experiment.metric_infos] == list(FINAL)
    assert [info.display_name for info in known.experiment.metric_infos][:4] == [
        "steps/s",
        "useful tokens/s",
        "speed to eager",
        "compile s",
    ]
    assert values == {"compile": "eager", "workload": "toy · seed 0"}


def test_two_columns_tell_runs_apart() -> None:
    _, values = columns_and_values(record("whole mode=reduce-overhead", start="warm", round=2, batch_size=128))
    assert values["compile"] == "whole whole.mode=reduce-overhead"
    assert values["workload"] == "captioning · batch 128 · warm · round 2 · seed 0 · bf16-mixed · NVIDIA H200"


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"task": {"data": {"batch_size": 16}}}, 16),
        ({"task": {"batch_size": 8, "data": None}}, 8),
        ({"task": {"data": {"batch_size": None}}}, None),
        ({}, None),
    ],
)
def test_batch_size_is_found_where_tasks_have_it(config: dict[str, Any], size: int | None) -> None:
    assert tensorboard.batch_size(RunRecord(task="toy", config=config)) == size
