"""HParams: a run's row in TensorBoard's table of runs, as events. Needs neither torch nor Lightning."""

from __future__ import annotations

import time
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_SUCCESS,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from trainer.report.runs import set_parameters
from trainer.telemetry.keys import FINAL
from trainer.telemetry.record import RunRecord

NUMBERS = frozenset({"batch_size", "round"})
"""Columns that are sorted as numbers. The seed is none: as a number it would be shown as ``0.0000``."""

FIRST = frozenset({"batch_size", "compile", "options", "start", "task"})
"""Columns that are shown before one asks for more: TensorBoard puts those that differ between runs first, then goes by
name, and shows five."""


def hyperparameters(record: RunRecord) -> dict[str, str | int | None]:
    """Columns that tell runs apart, the same in every run: TensorBoard takes the list of columns from any one of them.

    None = the run has no such thing; its field of the table stays blank.
    """
    return {
        "compile": record.label,
        "options": " ".join(f"{name}={value}" for name, value in set_parameters(record).items()),
        "task": record.task,
        "run": record.run,
        "batch_size": batch_size(record),
        "start": record.start,
        "round": record.round,
        "seed": str(record.seed),
        "device": record.device,
        "precision": record.precision,
    }


def batch_size(record: RunRecord) -> int | None:
    """Samples of a batch, as configured; None for a task that does not name them so."""
    task = record.config.get("task", {})
    for section in (task.get("data"), task):
        value = section.get("batch_size") if isinstance(section, dict) else None
        if isinstance(value, int):
            return value
    return None


def begin(record: RunRecord) -> list[Summary.Value]:
    """What opens the run's row: the columns of the table, and the run's values."""
    given = hyperparameters(record)
    experiment = Experiment(
        hparam_infos=[
            HParamInfo(
                name=name, type=DATA_TYPE_FLOAT64 if name in NUMBERS else DATA_TYPE_STRING, differs=name in FIRST
            )
            for name in given
        ],
        metric_infos=[MetricInfo(name=MetricName(tag=tag)) for tag in FINAL],
    )
    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in given.items():
        if isinstance(value, int):
            start.hparams[name].number_value = value
        elif value is not None:
            start.hparams[name].string_value = value
    return [
        _value(metadata.EXPERIMENT_TAG, experiment=experiment),
        _value(metadata.SESSION_START_INFO_TAG, session_start_info=start),
    ]


def end() -> Summary.Value:
    """What closes the row of a run that finished."""
    info = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=time.time())
    return _value(metadata.SESSION_END_INFO_TAG, session_end_info=info)


def _value(tag: str, **content: Any) -> Summary.Value:
    data = HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data))
