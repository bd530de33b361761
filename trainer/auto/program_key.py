"""Key of a program for remembered decisions: everything that its objects hold, so that nothing has to be thought of.

What differs from process to process by mistake only means that nothing is remembered.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from strategies import Program

NO_TIME = frozenset({"learning_rate", "lr", "initial_lr", "max_epochs", "max_steps", "seed"})
"""Names of what changes how much is learned, and no step's time: another run of the same program may choose by it."""
LIBRARIES = ("torch", "lightning", "pytorch_lightning")
"""Whose objects (trainers, schedulers, generators) hold paths and clocks; modules and optimizers are looked into."""
DEEPEST = 8
_OF_MODULES = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - {"training"}


def program_facts(program: Program) -> dict[str, Any]:
    """Classes and plain attributes of every module, sizes of its tensors, and optimizers with their options."""
    return {
        "modules": {
            path: [_named(type(child)), _plain({k: v for k, v in vars(child).items() if k not in _OF_MODULES})]
            for path, child in program.module.named_modules()
        },
        "optimizers": [
            [
                _named(type(optimizer)),
                _plain(optimizer.defaults),
                [_plain({**group, "params": len(group["params"])}) for group in optimizer.param_groups],
            ]
            for optimizer in program.optimizers
        ],
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` without addresses and tensors' contents, as JSON takes it."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    if isinstance(value, (complex, enum.Enum, torch.dtype, torch.device, torch.Size)):
        return str(value)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return _named(value)
    if depth == DEEPEST:
        return _named(type(value))
    if isinstance(value, functools.partial):
        return [_plain(each, depth + 1) for each in (value.func, value.args, value.keywords)]
    if isinstance(value, Mapping):
        told = {str(key): _plain(each, depth + 1) for key, each in value.items() if key not in NO_TIME}
        return dict(sorted(told.items()))
    if isinstance(value, (list, tuple)):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each, depth + 1) for each in value), key=repr)
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif type(value).__module__.partition(".")[0] in LIBRARIES or isinstance(value, nn.Module):
        return _named(type(value))  # modules have their own entries
    else:
        held = getattr(value, "__dict__", {})
    return [_named(type(value)), _plain(held, depth + 1)]


def _named(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
