"""Peak: how fast the device multiplies matrices, by its datasheet and measured in the same run.

Utilisation means something only beside a named peak. The datasheet's is the same for everyone but is never reached;
what a large product of matrices reaches on this machine, at its clocks and power limit, is what could be had.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from trainer.telemetry import hardware

DENSE_TERAFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "NVIDIA A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "NVIDIA L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "NVIDIA L40S": {"bf16": 362.05, "fp16": 362.05, "tf32": 183.0, "fp32": 91.6},
    "NVIDIA H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0},
    "NVIDIA H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "NVIDIA H100 80GB HBM3": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67.0},
    "NVIDIA H200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67.0},
    "NVIDIA H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "NVIDIA B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0},
}
"""Dense (not sparse) matrix rates by the beginning of the device's name, from NVIDIA's datasheets of these boards and,
for B200, of the HGX board with eight of them; where a datasheet gives the sparse rate alone, half of it. fp32 is the
rate without tensor cores. A device that is not here has no peak and so no utilisation: no figure is better than a wrong
one."""

KINDS = {"bf16": "bf16", "16": "fp16", "64": "fp64"}
"""What matrix products compute in, by the beginning of Lightning's name of the precision; the rest is fp32 or tf32."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
CUDA_SIZE = 8192
"""Rows and columns of the matrices that are multiplied on a GPU."""
HOST_SIZES = (128, 256, 512, 1024)
"""The same on a CPU, as long as they are quick: it may emulate a precision a hundred times slower than fp32."""
WARMUP, WINDOWS, IN_A_WINDOW = 3, 5, 4
MOST_SECONDS = 0.25
"""Timing takes about this long at most, beside one window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Matrix rates of one device, TFLOP/s; None where unknown or not measured."""

    kind: str | None
    """What the run's matrix products compute in: ``bf16``, ``fp16``, ``tf32``, ``fp32`` or ``fp64``."""
    datasheet: float | None
    measured: float | None
    float32_matmul_precision: str
    """Torch's setting, which decides between ``tf32`` and ``fp32``."""

    def figures(self, teraflops: float | None) -> dict[str, float | str | None]:
        """The record's fields, for a run that reaches ``teraflops``."""
        return {
            "matrix_precision": self.kind,
            "float32_matmul_precision": self.float32_matmul_precision,
            "peak_teraflops_datasheet": self.datasheet,
            "peak_teraflops_measured": self.measured,
            "model_flops_utilization": _share(teraflops, self.datasheet),
            "model_flops_utilization_measured_peak": _share(teraflops, self.measured),
        }


def find_peak(device: torch.device, precision: str, *, measure: bool | None) -> Peak:
    """Look up and measure; ``measure=None`` measures on a CUDA device only."""
    kind = matrix_kind(device, precision)
    wanted = device.type == "cuda" if measure is None else measure
    return Peak(
        kind=kind,
        datasheet=datasheet_teraflops(hardware.device_name(device), kind),
        measured=measured_teraflops(device, kind) if wanted else None,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def matrix_kind(device: torch.device, precision: str) -> str | None:
    """What matrix products of a run in ``precision`` compute in on ``device``; None for a precision of fewer bits."""
    for beginning, kind in KINDS.items():
        if precision.startswith(beginning):
            return kind
    if not precision.startswith("32"):
        return None
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "tf32" if has_tf32 and torch.get_float32_matmul_precision() != "highest" else "fp32"


def datasheet_teraflops(name: str, kind: str | None) -> float | None:
    """Dense rate of the device called ``name``, TFLOP/s; None when unknown."""
    known = [board for board in DENSE_TERAFLOPS if name.startswith(board)]
    return DENSE_TERAFLOPS[max(known, key=len)].get(kind or "") if known else None


def measured_teraflops(device: torch.device, kind: str | None) -> float | None:
    """Best rate of products of two large random matrices, TFLOP/s; None where there is no memory for them."""
    if kind is None or device.type not in ("cuda", "cpu"):
        return None
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    try:
        if device.type == "cuda":
            return _rate(CUDA_SIZE, device, kind, generator)
        rates: list[float] = []
        for size in HOST_SIZES:
            if not rates or 2 * size**3 / max(rates) / 1e12 < MOST_SECONDS / 10:
                rates.append(_rate(size, device, kind, generator))
        return max(rates)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _rate(size: int, device: torch.device, kind: str, generator: torch.Generator) -> float:
    """TFLOP/s of the best of a few products after a warm-up."""
    # Random: of zeros, a GPU multiplies faster than its power limit allows for numbers.
    left, right = (
        torch.empty(size, size, device=device, dtype=DTYPES[kind]).normal_(generator=generator) for _ in "ab"
    )
    product = torch.empty_like(left)

    def window(count: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=product)
        _wait(device)  # nothing is being trained yet
        return (time.perf_counter() - began) / count

    window(WARMUP)
    once = window(1)
    windows = min(WINDOWS, int(MOST_SECONDS / (IN_A_WINDOW * once)))
    return 2 * size**3 / min([once, *(window(IN_A_WINDOW) for _ in range(windows))]) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share(teraflops: float | None, peak: float | None) -> float | None:
    return teraflops / peak if teraflops and peak else None
