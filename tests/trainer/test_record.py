"""The record: facts fit its fields, and records of older versions are read by the names that they used."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path

from trainer.telemetry.record import Event, Rates, RunRecord


def test_a_record_takes_what_was_measured() -> None:
    record = RunRecord(task="any", steps=3)
    record.copy_fields(Rates(samples_per_second=2.0))
    assert (record.samples_per_second, record.steps) == (2.0, 3)


def test_a_record_reads_back_without_what_it_has_no_field_for(tmp_path: Path) -> None:
    event = Event(kind="recompile", reason="size", phase="validating")
    record = RunRecord(task="any", warmup_seconds=2.5, events=[event])
    text = record.save(tmp_path).read_text()
    assert RunRecord.load(tmp_path) == record
    (tmp_path / "record.json").write_text(json.dumps({**json.loads(text), "of_another_version": 1.0}))
    assert RunRecord.load(tmp_path) == record


def test_a_report_of_any_mapping_is_saved_and_what_is_not_finite_in_it_is_absent(tmp_path: Path) -> None:
    """A strategy of someone else's may report what Hydra or a library of theirs gives it."""
    record = RunRecord(task="any", report={"mine": {"options": UserDict(limit=float("inf"), password=float("inf"))}})
    record.save(tmp_path)
    assert RunRecord.load(tmp_path).report == {"mine": {"options": {"limit": None, "password": "***"}}}
