"""Peak memory of a run: the accelerator's allocations and this process's resident set."""

from __future__ import annotations

import gc
import resource
import sys

import torch

GIB = 1024.0**3

_before: dict[torch.device, int] = {}
"""Bytes of the peak before something that was not to be counted."""


def reset_peaks(device: torch.device) -> None:
    """Forget the accelerator's peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _before.pop(device, None)


def give_back(device: torch.device) -> None:
    """Free what is unreachable and what the allocator keeps: eager's blocks have other sizes than compiled's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """The peak so far, for ``resume``; 0 for a CPU."""
    return max(torch.cuda.max_memory_allocated(device), _before.get(device, 0)) if device.type == "cuda" else 0


def resume(device: torch.device, peak: int) -> None:
    """Go on counting from ``peak``: what was allocated since then and is freed again is no part of the run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _before[device] = peak


def allocator_counts(device: torch.device) -> tuple[int, int]:
    """How often the allocator had to free what it kept and ask again, and how often it asked the driver for memory, so
    far; zeros for a CPU. Takes a tenth of a millisecond."""
    if device.type != "cuda":
        return 0, 0
    counted = torch.cuda.memory_stats(device)
    return counted.get("num_alloc_retries", 0), counted.get("segment.all.allocated", 0)


def peak_device_gib(device: torch.device) -> float | None:
    """Highest memory held by tensors on ``device`` since ``reset_peaks``, in GiB; None for a CPU."""
    return peak_bytes(device) / GIB if device.type == "cuda" else None


def peak_process_gib() -> float:
    """Highest resident memory of this process since it started, in GiB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1.0 if sys.platform == "darwin" else 1024.0) / GIB
