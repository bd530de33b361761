"""Start-up of large networks: built without memory, then given weights that are drawn where they will be used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose tensors have shapes but no memory; draws no random numbers."""
    with torch.device("meta"):
        return build()


def materialise(net: nn.Module, build: Callable[[], nn.Module], *, device: torch.device, seed: int) -> None:
    """Give ``net``, of ``on_meta(build)``, the weights that ``build()`` draws on ``device`` under ``seed``.

    Modules stay the objects that they are, so that what was done to them (compiled in place, hooks) holds. The run's
    random numbers are left alone. A second network is built on the device and its tensors handed over, so that this
    works for whatever ``build`` makes, buffers included.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        drawn = build()
    for (path, module), (other_path, other) in zip(net.named_modules(), drawn.named_modules(), strict=True):
        assert path == other_path, "a network is built alike each time"
        # Shared tensors (a tied head) are one object in `drawn` and so become one object here.
        module._parameters.update(other._parameters)
        module._buffers.update(other._buffers)
