"""The record: facts fit its fields, and records of older versions are read by the names that they used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from trainer.telemetry.compiler import CompilerFigures
from trainer.telemetry.hardware import PeakFigures
from trainer.telemetry.meter import Meter, Rates, StepTimes
from trainer.telemetry.record import Event, RunRecord


@pytest.mark.parametrize("facts", [CompilerFigures, PeakFigures, Rates, StepTimes], ids=lambda each: each.__name__)
def test_facts_have_names_and_types_of_the_record(facts: type[Any]) -> None:
    fields = get_type_hints(RunRecord)
    for name, kind in get_type_hints(facts).items():
        assert fields[name] in (kind, kind | None)


def test_a_record_takes_what_was_measured() -> None:
    record = RunRecord(task="any", steps=3)
    record.take(Meter(warmup_steps=1).times(), Rates(samples_per_second=2.0))
    assert (record.steady_steps, record.samples_per_second, record.steps) == (0, 2.0, 3)


def test_an_older_record_is_read_by_the_names_of_today(tmp_path: Path) -> None:
    event = Event(kind="recompile", reason="size", phase="preflight")
    report = {"slowdown": {"slower": None}}
    record = RunRecord(
        task="any", preflight_seconds=2.5, joules_by_phase={"preflight": 3.0}, events=[event], report=report
    )
    text = record.save(tmp_path).read_text()
    assert RunRecord.load(tmp_path) == record
    values = json.loads(text)
    values["rehearsal_seconds"] = values.pop("preflight_seconds")
    values["joules_by_phase"] = {"rehearsal": 3.0}
    values["events"][0]["phase"] = "rehearsing"
    values["report"] = {"watchdog": report["slowdown"]}
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert RunRecord.load(tmp_path) == record
