"""What the run ran on: device name and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import torch

from trainer.telemetry.processor import processor_name

PACKAGES = ("crucible-train", "torch", "torchvision", "lightning", "triton", "hydra-core", "tensorboard")


def device_name(device: torch.device) -> str:
    """Name of the accelerator, or of the processor for a CPU run."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


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
