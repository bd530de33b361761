"""Remembered decisions: what earlier runs of the same program on the same machine measured, a small JSON file each."""

from __future__ import annotations

import contextlib
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
from strategies.options import cache_directories
from tasks.base import cache_folder
from trainer.auto import HELPER, TAKING_OVER, Knowledge
from trainer.telemetry.files import finite, written_whole

FORMAT = 4
"""Raised when the meaning of what is kept changes; files of another format count as none."""
MACHINE = "setup_seconds.json"
"""File of the last setups that this machine has seen, of any program, beside those of the programs."""
MAX_SETUPS = 20


def directory(given: str | None) -> Path:
    """Where decisions are kept: ``given``, or ``crucible/auto`` in the user's cache directory."""
    if given is not None:
        return Path(given).expanduser()
    return cache_folder() / "auto"


class Remembered:
    """What is known about one program, by its fingerprint, and about this machine.

    Args:
        folder: Directory of the files.
        fingerprint: Hexadecimal digits; everything that a step's time depends on.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.file, self._machine = folder / f"{fingerprint[:32]}.json", folder / MACHINE

    def recall(self, knowledge: Knowledge) -> str | None:
        """Fill in what earlier runs measured; returns when the newest of this program did, None where none has."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            knowledge.seen_seconds = {name: [float(one) for one in each] for name, each in _read(self._machine).items()}
        kept = _read(self.file)
        try:
            if kept.get("format") != FORMAT:
                return None
            warm = _caches_are_there(kept)
            for arm in knowledge.arms.values():
                values = kept["arms"].get(arm.name)
                if values is not None:
                    seconds, setup = values["step_seconds"], values["setup_seconds"]
                    arm.cached, arm.helper_seconds = warm and bool(setup), values.get("helper_seconds")
                    arm.step_seconds, arm.failed = seconds, arm.failed or values["failed"]
                    arm.setup_seconds = (setup.get("warm") if warm else None) or setup.get("cold")
                    arm.remembered = True
            return str(kept["written"])
        except (KeyError, TypeError, AttributeError):
            return None  # damaged: measured anew and written over

    def keep(self, knowledge: Knowledge, *, cache: str | None) -> str | None:
        """Write what this run measured, its compiled code taken from a ``cache`` that was warm or cold; returns why it
        could not, None when it could."""
        earlier = _read(self.file)
        earlier_arms = earlier.get("arms") if earlier.get("format") == FORMAT else None
        arms: dict[str, Any] = {}
        seen = knowledge.seen_seconds
        for arm in knowledge.arms.values():
            before = earlier_arms.get(arm.name, {}) if isinstance(earlier_arms, dict) else {}
            setup = dict(before.get("setup_seconds", {}))
            if arm.switched_at_step is not None and arm.setup_seconds is not None:
                helped = knowledge.helped.get(arm.module, False)
                setup["warm" if cache == "warm" or helped else "cold"] = arm.setup_seconds
                taken = {arm.changed: arm.setup_seconds} if cache != "warm" and arm.changed is not None else {}
                if helped and arm.changed == arm.module and arm.helper_seconds is not None:
                    taken = {TAKING_OVER.format(arm.module): arm.setup_seconds}
                    taken[HELPER.format(arm.module)] = arm.helper_seconds
                for what, seconds in taken.items():
                    seen[what] = [*seen.get(what, []), seconds][-MAX_SETUPS:]
            if arm.step_seconds is not None or arm.failed is not None:
                arms[arm.name] = {
                    "step_seconds": arm.step_seconds,
                    "setup_seconds": setup,
                    "helper_seconds": arm.helper_seconds,
                    "failed": arm.failed,
                }
        values: dict[str, Any] = {
            "format": FORMAT,
            "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
            "cache_directory": str(_cache_directory()),
            "arms": arms,
        }
        try:
            for path, kept in ((self.file, values), (self._machine, seen)):
                with written_whole(path, "w") as file:
                    json.dump(finite(kept), file, indent=1, allow_nan=False)
        except OSError as error:
            return f"{self.file.parent}: {error.strerror or error}"
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # none yet, or damaged
    return kept if isinstance(kept, dict) else {}


def _cache_directory() -> Path:
    return cache_directories()["TORCHINDUCTOR_CACHE_DIR"]


def _caches_are_there(kept: dict[str, Any]) -> bool:
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
