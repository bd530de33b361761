"""Presence: is what a run names on this machine at all? Looked at before torch is imported, which takes seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.checkpoint_files import find_checkpoint
from trainer.settings import Config

DEVICES = Path("/dev")
GPUS = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""What Linux drivers of GPUs leave there: NVIDIA's, of its boards with a processor too, AMD's, and that of WSL 2."""
HIDES = "CUDA_VISIBLE_DEVICES"


def require_present(config: Config, *, resumes: bool = True) -> None:
    """Raise ValueError where the data, the checkpoint (if it ``resumes``) or the GPU that ``config`` names is not
    there. What cannot be told without torch is not refused here."""
    asked = config.trainer.accelerator
    if asked in ("gpu", "cuda") and (reason := no_gpu()) is not None:
        raise ValueError(f"trainer.accelerator={asked}: {reason}")
    if config.resume is not None and resumes:
        find_checkpoint(config.resume)
    config.task.check()


def no_gpu() -> str | None:
    """Why there is certainly none; None where there may be one."""
    if sys.platform != "linux":
        return None
    if not any(True for name in GPUS for _ in DEVICES.glob(name)):
        return "this machine has no GPU"
    hidden = os.environ.get(HIDES)
    return f"{HIDES}={hidden} hides all GPUs" if hidden in ("", "-1") else None
