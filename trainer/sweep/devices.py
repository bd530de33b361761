"""Devices of a sweep that runs several cells at once: how many at a time, and which GPUs each of them sees."""

from __future__ import annotations

import os


def visible_gpus() -> list[str]:
    """Names of the GPUs that a process of this machine would see, as ``CUDA_VISIBLE_DEVICES`` has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library: NVML has an error class for each, and so has its import
        return []


def places(parallel: int, gpus_per_cell: int, gpus: list[str]) -> list[dict[str, str]]:
    """Environment variables for each of the cells that run at once.

    Raises ValueError when there are fewer GPUs than they need: cells that share one measure each other.
    """
    if parallel == 1:
        return [{}]
    possible = len(gpus) // gpus_per_cell
    if parallel == -1:
        if not possible:
            raise ValueError(
                f"hydra.launcher.parallel=-1 is a cell for each {gpus_per_cell} of this machine's GPUs, and it has "
                f"{len(gpus)}; name a number"
            )
        parallel = possible
    if not gpus:
        return [{} for _ in range(parallel)]
    if parallel > possible:
        raise ValueError(
            f"hydra.launcher.parallel={parallel} must be at most {possible}: this machine has {len(gpus)} GPUs, each "
            f"cell takes {gpus_per_cell}, and cells that share one measure each other"
        )
    groups = [gpus[first : first + gpus_per_cell] for first in range(0, possible * gpus_per_cell, gpus_per_cell)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups[:parallel]]
