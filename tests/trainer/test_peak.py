"""The peak that utilisation is a share of: the datasheet's for the precision of the run, and one that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import curve, train
from trainer.console import summary
from trainer.telemetry.hardware import datasheet_teraflops, find_peak, matrix_kind, measured_teraflops
from trainer.telemetry.record import RunRecord

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10", "fp16", 125.0),
        ("NVIDIA A10G", "fp64", None),
        ("NVIDIA H200", None, None),
        ("AMD EPYC", "fp32", None),
    ],
)
def test_the_datasheets_peak_is_that_of_the_board_and_precision(
    name: str, kind: str | None, expected: float | None
) -> None:
    assert datasheet_teraflops(name, kind) == expected


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("16-true", "fp16"),
        ("32-true", "fp32"),
        ("64-true", "fp64"),
        ("transformer-engine", None),
    ],
)
def test_matrix_products_compute_in_what_the_precision_says(precision: str, kind: str | None) -> None:
    assert matrix_kind(CPU, precision) == kind


@pytest.mark.parametrize(("setting", "kind"), [("highest", "fp32"), ("high", "tf32"), ("medium", "tf32")])
def test_tf32_depends_on_torchs_setting_on_a_gpu_that_has_it(
    setting: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    assert matrix_kind(torch.device("cuda"), "32-true") == kind
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert matrix_kind(torch.device("cuda"), "32-true") == "fp32"


def test_a_measured_peak_is_a_rate_and_draws_none_of_the_runs_random_numbers() -> None:
    before = torch.get_rng_state()
    measured = measured_teraflops(CPU, "fp32")
    assert measured is not None
    assert 1e-5 < measured < 100
    assert torch.equal(torch.get_rng_state(), before)
    assert measured_teraflops(torch.device("meta"), "fp32") is None


def test_without_a_wish_only_a_gpu_is_measured() -> None:
    assert find_peak(CPU, "32-true", measure=None).peak_teraflops_measured is None


def test_both_peaks_and_both_utilisations_are_named(tmp_path: Path) -> None:
    arguments = ("trainer.measure_peak=true", "trainer.max_steps=8", "trainer.warmup_steps=1")
    record = train(tmp_path, *arguments)
    assert record.peak_teraflops_datasheet is record.model_flops_utilization is None
    assert record.peak_teraflops_measured is not None
    assert record.teraflops_per_second is not None
    share = record.teraflops_per_second / record.peak_teraflops_measured
    assert record.model_flops_utilization_measured_peak == pytest.approx(share)
    assert record.matrix_precision == "fp32"
    record.teraflops_per_second = 1.0  # a toy's own has no row
    assert "of the measured" in summary(record)["TFLOP/s"]
    assert curve(tmp_path, "usage/model_flops_utilization_measured_peak")


def test_a_run_in_fp32_states_whether_tf32_was_used() -> None:
    def stated(kind: str) -> str:
        record = RunRecord(task="any", device="NVIDIA H200", device_type="cuda", precision="32-true")
        record.matrix_precision = kind
        return summary(record)["device"]

    assert stated("tf32") == "NVIDIA H200 · 32-true (matrix products in TF32)"
    assert stated("fp32") == "NVIDIA H200 · 32-true (no TF32 in matrix products)"
    assert stated("bf16") == "NVIDIA H200 · 32-true"
