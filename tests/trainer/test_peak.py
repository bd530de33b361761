"""The peak that utilisation is a share of: the datasheet's for the precision of the run, and one that is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.runs import curve, train
from trainer.console import summary
from trainer.telemetry.hardware import (
    count_peak_from,
    datasheet_teraflops,
    matrix_kind,
    measured_gigabytes_per_second,
    measured_teraflops,
    optimizer_gigabytes,
    peak_bytes,
)
from trainer.telemetry.record import Peak

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
    assert 1e-5 < measured < 100
    assert torch.equal(torch.get_rng_state(), before)
    assert 0.1 < measured_gigabytes_per_second(CPU) < 10_000
    assert measured_teraflops(torch.device("meta"), "fp32") is None
    assert measured_gigabytes_per_second(torch.device("meta")) is None


def stepped(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of 1,000 parameters after a step, 500 that are frozen and 500 that get no gradient."""
    used, frozen, idle = (nn.Parameter(torch.ones(count, dtype=dtype)) for count in (1000, 500, 500))
    optimizer = kind([used, frozen.requires_grad_(False), idle], lr=0.1, **options)
    used.grad = torch.ones_like(used)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "expected"),
    [
        # parameter read and written, gradient read, two states read and written, a counter of 4 bytes likewise
        (torch.optim.AdamW, torch.float32, {}, 1000 * (8 + 4 + 16) + 8),
        (torch.optim.AdamW, torch.bfloat16, {}, 1000 * (4 + 2 + 8) + 8),
        (torch.optim.AdamW, torch.float32, {"amsgrad": True}, 1000 * (8 + 4 + 24) + 8),
        (torch.optim.SGD, torch.float32, {"momentum": 0.9}, 1000 * (8 + 4 + 8)),
        (torch.optim.Adafactor, torch.float32, {}, None),
    ],
)
def test_an_optimizer_moves_its_parameters_gradients_and_states_once(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any], expected: float | None
) -> None:
    found = optimizer_gigabytes([stepped(kind, dtype, **options)])
    assert found == (None if expected is None else expected / 1e9)


def test_what_of_its_tensors_an_optimizer_moves_is_not_guessed() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert optimizer_gigabytes([torch.optim.SGD(embedding.parameters(), lr=0.1)]) is None
    assert optimizer_gigabytes([stepped(torch.optim.SGD, torch.float32) for _ in "ab"]) is None
    assert optimizer_gigabytes([]) is None


def test_the_least_time_is_that_of_products_and_then_of_bytes() -> None:
    known: dict[str, Any] = {"matrix_precision": "bf16", "peak_teraflops_datasheet": None}
    peak = Peak(**known, peak_teraflops_measured=800.0, peak_gigabytes_per_second_measured=4000.0)
    # LLaMA-7B: 6.74e9 parameters of 28 bytes
    assert peak.least_seconds(400.0, 188.7) == pytest.approx(0.5 + 0.0472, rel=1e-3)
    assert peak.least_seconds(None, 188.7) is peak.least_seconds(400.0, None) is None
    unmeasured = Peak(**known, peak_teraflops_measured=800.0, peak_gigabytes_per_second_measured=None)
    assert unmeasured.least_seconds(400.0, 188.7) is None


def test_both_peaks_and_both_utilisations_are_named(tmp_path: Path) -> None:
    arguments = ("trainer.measure_peak=true", "trainer.max_steps=8", "trainer.warmup_steps=1")
    record = train(tmp_path, *arguments)
    assert record.peak_teraflops_datasheet is record.model_flops_utilization is None
    share = record.teraflops_per_second / record.peak_teraflops_measured
    assert record.model_flops_utilization_measured_peak == pytest.approx(share)
    assert record.matrix_precision == "fp32"
    products = share * (record.steady_step_seconds_mean or 0)
    moved = record.optimizer_gigabytes / record.peak_gigabytes_per_second_measured
    assert record.least_step_seconds == pytest.approx(products + moved)
    assert record.roofline_share == pytest.approx(record.least_step_seconds / (record.steady_step_seconds_mean or 0))
    assert summary(record)["utilization"].endswith("% of the peak measured when the run began")
    assert curve(tmp_path, "usage/model_flops_utilization_measured_peak")


def test_memory_that_cuda_graphs_keep_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    device, allocated, looked = torch.device("cuda", 1), {"now": 500, "peak": 600}, []

    def segment(of: int, pool: tuple[int, int], total: int, taken: int) -> dict[str, Any]:
        return {"device": of, "segment_pool_id": pool, "total_size": total, "allocated_size": taken}

    def snapshot() -> list[dict[str, Any]]:
        looked.append(1)
        return [segment(1, (0, 0), 900, 400), segment(1, (0, 7), 300, 100), segment(0, (0, 8), 5000, 0)]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocated["peak"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1200)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    assert peak_bytes(device) == 500 + 200
    allocated.update(now=100, peak=650)
    assert peak_bytes(device) == 700, "a peak is kept"
    assert looked == [1], "the pools are looked at once while the allocator holds as much"
    count_peak_from(device, 0)
    assert peak_bytes(device) == 650
