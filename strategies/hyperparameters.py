"""Hyperparameters on the device: 0-D tensors that follow plain floats of the host, so that no change recompiles.

A learning rate that is a Python float is a constant of compiled code, and is baked into a CUDA graph. Here the floats
stay where users, schedulers and state dicts look for them, in ``param_groups``, and what runs on the device reads
0-D tensors that are written only where the host's value has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]


class DeviceScalar:
    """One number of the host as a 0-D tensor of the device."""

    __slots__ = ("_value", "tensor")

    def __init__(self, value: float, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.tensor = torch.full((), value, device=device, dtype=dtype)
        self._value = float(value)

    def write(self, value: float) -> None:
        """Let the tensor have ``value``. Waits for nothing; launches one small kernel if it is another value."""
        # Not-a-number is never equal to itself: it is written each time, which does no harm.
        if value != self._value:
            self.tensor.fill_(value)
            self._value = float(value)


def is_number(value: object) -> bool:
    """Whether an entry of a parameter group is a number that may be scheduled; flags and counts of steps are not."""
    return isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0)


class Mirror:
    """Every float of ``optimizer.param_groups`` (tuples of floats too, such as betas) as 0-D tensors on the device.

    A user's own tensor hyperparameter is copied. Parameters of one group are expected on one device. ``refresh``
    follows groups that were added since.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._scalars: dict[tuple[int, str, int], DeviceScalar | Tensor] = {}
        self._tensors: list[dict[str, Value]] = []
        self.refresh()

    def __getitem__(self, key: tuple[int, str]) -> Value:
        """The 0-D tensor, or the tuple of them, of ``(index of the group, name)``. Raises KeyError for others."""
        index, name = key
        return self._tensors[index][name]

    def group(self, index: int) -> dict[str, Value]:
        """All tensors of one group by name; the same objects for as long as the optimizer lives."""
        return self._tensors[index]

    def refresh(self) -> None:
        """Write what has changed on the host since the last time; to be called before each step."""
        for index, group in enumerate(self.optimizer.param_groups):
            if index == len(self._tensors):
                self._tensors.append(self._mirrored(index, group))
                continue
            for name in self._tensors[index]:
                value = group[name]
                for position, one in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
                    self._write(self._scalars[index, name, position], one)

    def _mirrored(self, index: int, group: dict[str, Any]) -> dict[str, Value]:
        device = group["params"][0].device
        precise = any(parameter.dtype == torch.float64 for parameter in group["params"])
        dtype = torch.float64 if precise else torch.float32
        tensors: dict[str, Value] = {}
        for name, value in group.items():
            values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
            # "initial_lr" and the like are a scheduler's notes to itself.
            if name == "params" or name.startswith(("initial_", "max_", "base_")) or not all(map(is_number, values)):
                continue
            made = []
            for position, one in enumerate(values):
                scalar: DeviceScalar | Tensor = (
                    one.detach().to(device=device, copy=True)
                    if isinstance(one, Tensor)
                    else DeviceScalar(one, device=device, dtype=dtype)
                )
                self._scalars[index, name, position] = scalar
                made.append(scalar if isinstance(scalar, Tensor) else scalar.tensor)
            if made:
                tensors[name] = tuple(made) if isinstance(value, (tuple, list)) else made[0]
        return tensors

    @staticmethod
    def _write(scalar: DeviceScalar | Tensor, value: Any) -> None:
        if isinstance(scalar, Tensor):
            # A tensor stays one; a scheduler that replaced it by a float is followed all the same.
            scalar.copy_(value, non_blocking=True) if isinstance(value, Tensor) else scalar.fill_(value)
        elif isinstance(value, Tensor):
            scalar.tensor.copy_(value, non_blocking=True)
            scalar._value = float("nan")
        else:
            scalar.write(value)
