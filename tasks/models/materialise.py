"""Start-up of networks: built without memory, then given weights that are drawn where they will be used.

Layers draw their weights as they are made: a host takes seconds for a few hundred million of them and minutes for
billions, a GPU milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1_000_000_000
"""Parameters from which on weights are drawn on the device whatever it is: a host takes minutes for them."""


def start(build: Callable[[], nn.Module], initialise: str) -> nn.Module:
    """Build a network with its weights, or without memory where they are to be drawn on the device, by ``materialise``.

    Args:
        build: Makes the network alike each time, and draws its weights from torch's global generator.
        initialise: ``host`` (weights drawn now), ``device`` (later) or ``auto`` (later where there is a GPU or the
            network ``is_large``; now also where it can only be built with memory).

    Raises:
        ValueError: ``device``, and the network can only be built with memory. And what ``build`` raises.
    """
    if initialise == "host":
        return build()
    try:
        net = on_meta(build)
    except Exception as error:  # constructors that compute with their tensors fail in ways of their own
        if initialise == "auto":
            return build()  # raises again what has nothing to do with memory
        if isinstance(error, ValueError):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"task.initialise=device: this network cannot be built without memory ({reason})") from error
    return net if initialise == "device" or torch.cuda.is_available() or is_large(net) else build()


def is_large(net: nn.Module) -> bool:
    """Whether ``net`` has ``LARGE`` parameters or more."""
    return sum(parameter.numel() for parameter in net.parameters()) >= LARGE


def is_on_meta(net: nn.Module) -> bool:
    """Whether ``net`` is still without memory."""
    return any(tensor.is_meta for tensors in (net.parameters(), net.buffers()) for tensor in tensors)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose tensors have shapes but no memory; draws no random numbers.

    Raises RuntimeError for one with tensors that ``materialise`` would not find, and what ``build`` raises.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        net = build()
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and any(t.is_meta for t in _tensors(value)):
                raise RuntimeError(f"{path}.{name} holds a tensor that is neither a parameter nor a buffer")
    return net


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
