"""Timed: seconds of a piece of work on a device, waited for before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of(device: torch.device, work: Callable[[], Any], *, times: int = 1) -> float:
    """Mean seconds of ``work``, done ``times`` times in a row; on CUDA until the device is through with it."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
