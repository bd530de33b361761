"""Remembered decisions: what earlier runs of the same program on the same machine measured, a small JSON file each."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strategies import Program
from strategies.toolchain import cache_directories
from tasks.resources import cache_folder
from trainer.auto.estimates import Estimates
from trainer.telemetry.files import finite, written_whole

FORMAT = 3
"""Raised when the meaning of what is kept changes; files of another format count as none."""
_MEASURED = (
    "step_seconds",
    "device_seconds",
    "at_most",
    "cannot_capture",
    "cold_seconds",
    "warm_seconds",
    "failed",
)


def directory(given: str | None) -> Path:
    """Where decisions are kept: ``given``, or ``crucible/auto`` in the user's cache directory."""
    if given is not None:
        return Path(given).expanduser()
    return cache_folder() / "auto"


class Remembered:
    """What is known about one program, by its fingerprint.

    Args:
        folder: Directory of the files.
        fingerprint: Hexadecimal digits; everything that a step's time depends on.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.file = folder / f"{fingerprint[:32]}.json"

    def recall(self, estimates: Estimates) -> str | None:
        """Fill in what earlier runs measured; returns when the newest of them did, None where there is nothing."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                return None
            modules = {name: {key: values[key] for key in _MEASURED} for name, values in kept["modules"].items()}
            written = str(kept["written"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # none yet, or not ours, or damaged: measured anew and written over
        estimates.warm = estimates.warm or _cache_was(kept)
        for name, values in modules.items():
            if name in estimates.modules:
                module = estimates.modules[name]
                for key, value in values.items():
                    if value is not None:
                        setattr(module, key, value)
                # Another process, whose compiler begins anew, though perhaps from its caches.
                module.spent = False
        return written

    def keep(self, estimates: Estimates, *, chosen: str) -> str | None:
        """Write what this run measured; returns why it could not, None when it could."""
        modules = {name: {key: getattr(module, key) for key in _MEASURED} for name, module in estimates.modules.items()}
        values: dict[str, Any] = {
            "format": FORMAT,
            "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
            "chosen": chosen,
            "steps": estimates.steps,
            "cache_directory": str(_cache_directory()),
            "modules": modules,
        }
        try:
            with written_whole(self.file, "w") as file:
                json.dump(finite(values), file, indent=1, allow_nan=False)
        except OSError as error:
            return f"{self.file.parent}: {error.strerror or error}"
        return None


def _cache_directory() -> Path:
    return cache_directories()["TORCHINDUCTOR_CACHE_DIR"]


def _cache_was(kept: dict[str, Any]) -> bool:
    """Whether the compiler's caches are those of the run that wrote this, and are still there."""
    here = _cache_directory()
    return kept.get("cache_directory") == str(here) and here.is_dir() and any(here.iterdir())


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
        plain = {str(key): _plain(each, depth + 1) for key, each in value.items() if key not in NO_TIME}
        return dict(sorted(plain.items()))
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
