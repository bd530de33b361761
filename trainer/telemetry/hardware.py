"""Hardware: what a run ran on, the memory it took, how fast the device multiplies matrices and moves bytes.

Utilisation means something only beside a named peak. The datasheet's is the same for everyone but is never reached;
what a large product of matrices reaches on this machine, at its clocks and power limit, is what could be had. A step
takes at least its matrix products at that rate, and then the optimizer's bytes at the rate of a large copy.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strategies.loop_protocol import Loop
from trainer.telemetry.machine_monitor import now, processor_name
from trainer.telemetry.record import Peak, RunRecord

PACKAGES = ("crucible-train", "torch", "torchvision", "lightning", "triton", "hydra-core", "tensorboard")
GIB = 1024.0**3
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
rate without tensor cores. A device that is not here has no peak and so no utilisation."""

KINDS = {"bf16": "bf16", "16": "fp16", "64": "fp64"}
"""What matrix products compute in, by the beginning of Lightning's name of the precision; the rest is fp32 or tf32."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CUDA_SIZE = 8192
"""Rows and columns of the matrices that are multiplied on a GPU."""
HOST_SIZES = (128, 256, 512, 1024)
"""The same on a CPU, as long as they are quick: it may emulate a precision a hundred times slower than fp32."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""By kind of device, more than its caches hold: on a CPU at least than one core's."""
WARMUP, WINDOWS, IN_A_WINDOW = 3, 5, 4
MAX_SECONDS = 0.25
"""Timing takes about this long at most, beside one window."""

_before: dict[torch.device, int] = {}
"""Bytes of the peak before something that was not to be counted."""
_pools: dict[torch.device, tuple[int, int]] = {}
"""Bytes reserved when the pools of CUDA graphs were looked at, and what they kept free then."""


def device_name(device: torch.device) -> str:
    """Name of the accelerator, or of the processor for a CPU run."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA and the packages that decide speed; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def process_age_seconds() -> float | None:
    """Seconds since this process started, by the kernel's account; None where /proc does not tell."""
    try:
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def synchronize(device: torch.device) -> None:
    """Until the device is through with what it was given; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, work: Callable[[], Any], *, times: int = 1) -> float:
    """Mean seconds of ``work``, done ``times`` times in a row; on CUDA until the device is through with it."""
    synchronize(device)
    began = now()
    for _ in range(times):
        work()
    synchronize(device)
    return (now() - began) / times


# ---- memory -----------------------------------------------------------------------------------------------------


def free_unused_memory(device: torch.device) -> None:
    """Free what is unreachable and what the allocator keeps: eager's blocks have other sizes than compiled's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """The peak so far, for ``count_peak_from``; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    reserved = torch.cuda.memory_reserved(device)
    if _pools.get(device, (0, 0))[0] != reserved:  # the pools can only differ when this does
        segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
        here = [each for each in segments if each["device"] == (device.index or 0)]
        _pools[device] = (reserved, sum(each["total_size"] - each["allocated_size"] for each in here))
    # What the graphs' pools keep is used by a replay, which allocates nothing that a peak would show.
    held = torch.cuda.memory_allocated(device) + _pools.get(device, (0, 0))[1]
    _before[device] = max(_before.get(device, 0), torch.cuda.max_memory_allocated(device), held)
    return _before[device]


def count_peak_from(device: torch.device, peak: int) -> None:
    """Count from ``peak`` on: what was allocated since then and is freed again is no part of the run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _before[device] = peak


def peak_device_gib(device: torch.device) -> float | None:
    """Highest memory of tensors and CUDA graphs on ``device`` since ``count_peak_from``, in GiB; None for a CPU."""
    return peak_bytes(device) / GIB if device.type == "cuda" else None


def peak_process_gib() -> float:
    """Highest resident memory of this process since it started, in GiB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1.0 if sys.platform == "darwin" else 1024.0) / GIB


# ---- the peaks that a step is compared with ------------------------------------------------------------------------

MOVE_ALL_ONCE = tuple(getattr(torch.optim, name) for name in ("Adam", "AdamW", "SGD", "RMSprop", "NAdam", "RAdam"))
"""Optimizers of which a step moves each of their tensors; others may repeat, or leave some out."""


def optimizer_gigabytes(optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
    """What a step of ``optimizers`` has to move on this device, in 1e9 bytes: parameters and states are read and
    written, gradients read, each once. None for several optimizers, sparse gradients and kinds that are not known."""
    # Hugging Face's Trainer holds the optimizer within accelerate's.
    found = [getattr(one, "optimizer", one) for one in optimizers]
    if len(found) != 1 or type(optimizer := found[0]) not in MOVE_ALL_ONCE:
        return None
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    moved = [one for one in parameters if optimizer.state.get(one) or one.grad is not None]  # others had no gradient
    if not moved or any(one.grad is not None and one.grad.layout != torch.strided for one in moved):
        return None
    total = 0
    for one in moved:
        states = [each for each in optimizer.state.get(one, {}).values() if torch.is_tensor(each)]
        states = [each for each in states if each.device == one.device]
        total += 3 * _local_bytes(one) + 2 * sum(map(_local_bytes, states))
    return total / 1e9


def _local_bytes(tensor: Any) -> int:
    """On this device; a sharded tensor is on several."""
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes)


def find_peak(device: torch.device, precision: str, *, measure: bool | None) -> Peak:
    """Look up and measure; ``measure=None`` measures on a CUDA device only."""
    kind = matrix_kind(device, precision)
    wanted = device.type == "cuda" if measure is None else measure
    found = Peak(
        matrix_precision=kind,
        peak_teraflops_datasheet=datasheet_teraflops(device_name(device), kind),
        peak_teraflops_measured=measured_teraflops(device, kind) if wanted else None,
        peak_gigabytes_per_second_measured=measured_gigabytes_per_second(device) if wanted else None,
    )
    if wanted and device.type == "cuda":
        torch.cuda.empty_cache()  # here, where nothing holds the matrices any more
    return found


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


@torch.no_grad()
def measured_teraflops(device: torch.device, kind: str | None) -> float | None:
    """Best rate of products of two large random matrices, TFLOP/s; None where there is no memory for them."""
    if kind is None or device.type not in COPIED_BYTES:
        return None
    best, generator = 0.0, torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    with contextlib.suppress(torch.OutOfMemoryError):
        for size in (CUDA_SIZE,) if device.type == "cuda" else HOST_SIZES:
            teraflop = 2 * size**3 / 1e12
            if best and teraflop / best >= MAX_SECONDS / 10:
                break
            # Random: of zeros, a GPU multiplies faster than its power limit allows for numbers.
            empty = partial(torch.empty, size, size, device=device, dtype=DTYPES.get(kind, torch.float32))
            left, right = (empty().normal_(generator=generator) for _ in "ab")
            best = max(best, teraflop / _best_seconds(device, partial(torch.mm, left, right, out=empty())))
    return best or None


def measured_gigabytes_per_second(device: torch.device) -> float | None:
    """Best rate of a copy of random bytes, read and written, GB/s; None where there is no memory for it."""
    if (size := COPIED_BYTES.get(device.type)) is None:
        return None
    generator = torch.Generator(device).manual_seed(0)
    with contextlib.suppress(torch.OutOfMemoryError):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(generator=generator)
        return 2 * size / _best_seconds(device, partial(torch.empty_like(source).copy_, source)) / 1e9
    return None


def _best_seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Of ``work``: the best of a few windows after a warm-up."""
    seconds_of(device, work, times=WARMUP)
    once = seconds_of(device, work)
    windows = min(WINDOWS, int(MAX_SECONDS / (IN_A_WINDOW * once)))
    return min([once, *(seconds_of(device, work, times=IN_A_WINDOW) for _ in range(windows))])


def note_machine(record: RunRecord, loop: Loop) -> None:
    record.device, record.device_type = device_name(loop.device), loop.device.type
    record.world_size, record.precision = loop.world_size, loop.precision
