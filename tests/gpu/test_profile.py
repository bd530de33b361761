"""On a CUDA device: the profiler sees kernels, with and without CUDA graphs; joules by phase; the doctor's lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scripts.doctor import ERROR, OK, with_torch
from tests.trainer.runs import train
from trainer.console import summary
from trainer.telemetry.profile import STEPS
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.gpu
ON_GPU = ("trainer.accelerator=gpu", "trainer.precision=auto", "trainer.deterministic=false")
PROFILED = (*ON_GPU, "profile=on", "trainer.max_steps=40", "trainer.log_every_n_steps=10")


def kernels_in(folder: Path, record: RunRecord) -> int:
    """Kernels in the exported trace."""
    with gzip.open(folder / record.report["profile"]["trace"], "rt", encoding="utf-8") as file:
        return sum(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])


@pytest.mark.parametrize(("strategy", "backend"), [("eager", "eager"), ("regional", "inductor")])
def test_idle_time_and_kernels_are_read(strategy: str, backend: str, tmp_path: Path) -> None:
    record = train(tmp_path, *PROFILED, strategy=strategy, backend=backend)
    facts = record.report["profile"]
    assert record.status == "finished"
    assert facts["steps"] == STEPS
    assert facts["idle_share"] is None or 0 <= facts["idle_share"] < 1
    assert facts["busy_seconds_per_step"] > 0
    assert sum(row["calls_per_step"] for row in facts["kernels"]) > 10
    assert sum(row["share"] for row in facts["kernels"]) <= 1.0001
    assert kernels_in(tmp_path, record) > STEPS * 10
    assert facts["kernels"][0]["name"][:40] in summary(record)["profile"]


def test_kernels_of_a_captured_step_are_seen(tmp_path: Path) -> None:
    changes = ("compile.cuda_graph.required=true", "trainer.max_steps=60")
    record = train(tmp_path, *PROFILED, *changes, strategy="[regional,cuda_graph]", backend="inductor")
    facts = record.report["profile"]
    assert record.status == "finished", record.reason
    assert sum(row["calls_per_step"] for row in facts["kernels"]) > 10
    assert kernels_in(tmp_path, record) > STEPS * 10


def test_steps_after_the_profile_are_what_they_were(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", *ON_GPU, "trainer.max_steps=200", "trainer.log_every_n_steps=50")
    profiled = train(
        tmp_path / "profiled", *ON_GPU, "profile=on", "trainer.max_steps=200", "trainer.log_every_n_steps=50"
    )
    assert plain.steady_step_seconds_median is not None
    assert profiled.steady_step_seconds_median == pytest.approx(plain.steady_step_seconds_median, rel=0.25)


def test_the_doctor_finds_nothing_wrong_and_compiles_for_the_device() -> None:
    found = {finding.name: finding for finding in with_torch()}
    assert [finding for finding in found.values() if finding.status == ERROR] == []
    assert "device 0" in found
    assert "NVIDIA driver" in found["machine"].message
    assert found["compile"].status == OK
    assert "on cuda" in found["compile"].message
