"""What a run leaves in TensorBoard: known keys, text pages, and a row in the HParams table that ends or does not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.report.records import record
from tests.strategies import backends
from tests.trainer.runs import PAGES, SCALARS, events_of, train
from tests.trainer.test_resume_exactness import send_in_step
from trainer.report.run_verdict import run_verdict
from trainer.telemetry import tensorboard
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.tensorboard import FINAL, TensorBoardPages, events_table

OF_THE_TASK = ("val/",)
STEPS = 20
"""Long enough for steps in which nothing is checked."""


@pytest.fixture(scope="module", params=["eager", "regional"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, private_cache: None
) -> tuple[RunRecord, EventAccumulator]:
    """A finished run with a validation, and its events."""
    backends.register()
    run_dir = tmp_path_factory.mktemp("tensorboard")
    record = train(run_dir, "trainer.val_every_n_steps=10", f"trainer.max_steps={STEPS}", strategy=request.param)
    assert record.status == "finished"
    return record, events_of(run_dir)


def session(events: EventAccumulator, part: str) -> HParamsPluginData | None:
    """A part of the run's row in the HParams table."""
    content = events.PluginTagToContent("hparams")
    tag = f"_hparams_/{part}"
    return HParamsPluginData.FromString(content[tag]) if tag in content else None


def text(events: EventAccumulator, page: str) -> str:
    """Newest text of a page."""
    return str(events.Tensors(f"{page}/text_summary")[-1].tensor_proto.string_val[0].decode())


def test_every_key_is_one_that_is_documented(finished: tuple[RunRecord, EventAccumulator]) -> None:
    _, events = finished
    written = {key for key in events.Tags()["scalars"] if not key.startswith(OF_THE_TASK)}
    assert written <= {*SCALARS, *FINAL}, "a key that is not documented"
    assert "val/loss" in events.Tags()["scalars"]


def test_what_exists_on_a_cpu_is_written_and_what_does_not_is_not(
    finished: tuple[RunRecord, EventAccumulator],
) -> None:
    record, events = finished
    written = set(events.Tags()["scalars"])
    absent = {"usage/peak_device_gib", "usage/joules_per_sample", "usage/model_flops_utilization"}
    absent |= {"warmup/cache_hits", "warmup/cache_misses", "usage/model_flops_utilization_measured_peak"}
    absent |= {key for key in SCALARS if key.startswith("ranks/")}  # of processes
    if record.label == "eager":
        absent |= {key for key in SCALARS if key.startswith(("warmup/", "usage/audit_"))}
        absent -= {"warmup/seconds", "warmup/first_step_seconds"}
    assert written & SCALARS == SCALARS - absent
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert record.losses == [[event.step, pytest.approx(event.value)] for event in events.Scalars("train/loss")]


def test_final_figures_are_the_records(finished: tuple[RunRecord, EventAccumulator]) -> None:
    record, events = finished
    for key, (name, _) in FINAL.items():
        value = getattr(record, name, None)
        if name == "speed_to_eager":
            value = run_verdict(record).shown_ratio
        assert (value is not None) == (key in events.Tags()["scalars"]), key
        if value is not None:
            scale = 1e3 if "_milliseconds" in key else 1.0
            assert events.Scalars(key)[-1].value == pytest.approx(value * scale, rel=1e-5)


def test_the_text_pages_are_there(finished: tuple[RunRecord, EventAccumulator]) -> None:
    record, events = finished
    assert f'"max_steps": {STEPS}' in text(events, "run/config")
    assert f"| strategies | {record.label} |" in text(events, "run/summary")
    pages = {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")}
    pages = {page for page in pages if not page.startswith(OF_THE_TASK)}
    assert pages == (PAGES - {"compile/events"} if record.label == "eager" else PAGES)
    if record.label != "eager":
        for event in record.events:
            # The table shows the end of the path: file, line and function.
            assert str(event.location).rpartition("/")[2] in text(events, "compile/events")
        assert "| parity with eager | passed" in text(events, "run/summary")


def test_a_finished_run_has_a_whole_row_in_the_hparams_table(finished: tuple[RunRecord, EventAccumulator]) -> None:
    record, events = finished
    experiment = session(events, "experiment")
    begin, end = session(events, "session_start_info"), session(events, "session_end_info")
    assert {metric.name.tag for metric in experiment.experiment.metric_infos} == set(FINAL)
    hyperparameters = begin.session_start_info.hparams
    assert hyperparameters["compile"].string_value.split()[0] == record.label
    if record.label != "eager":
        path = "modular.parts.encoder" if record.label == "modular" else record.label
        assert f"{path}.backend=eager" in hyperparameters["compile"].string_value
    assert end is not None


def test_a_run_that_did_not_finish_has_no_end_in_the_hparams_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_in_step(monkeypatch, 2, signal.SIGINT)
    assert train(tmp_path).status == "interrupted"
    events = events_of(tmp_path)
    assert session(events, "session_start_info") is not None
    assert session(events, "session_end_info") is None
    assert not [key for key in events.Tags()["scalars"] if key in FINAL]
    assert "| strategies |" in text(events, "run/summary")


def test_equal_events_are_one_row_and_their_text_cannot_break_the_table() -> None:
    event = {"kind": "recompile", "reason": "a | b\nc", "location": "model.py:3 forward"}
    header, _, *rows = events_table([Event(step=2, **event), Event(step=5, **event)]).splitlines()
    (row,) = rows
    assert "| 2 | 2 | a \\| b<br>c | `model.py:3 forward` |" in row, "twice, first in step 2"
    assert row.replace("\\|", "").count("|") == header.count("|")
    assert events_table([]) == "No graph breaks, recompiles or fallbacks."


def test_pages_that_cannot_be_written_at_the_end_do_not_take_the_record_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise OSError("Writer is closed")

    monkeypatch.setattr(TensorBoardPages, "finish", broken)
    record = train(tmp_path, task="micro")
    told = "TensorBoard's last pages were not written: OSError: Writer is closed"
    assert (record.status, record.notes[-1]) == ("finished", told)
    assert RunRecord.load(tmp_path).notes[-1] == told
    assert "Writer is closed" in capsys.readouterr().out


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
