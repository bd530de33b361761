"""Remembered decisions: what earlier runs of the same program on the same machine measured, a small JSON file each."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strategies import Program
from strategies.options import cache_directories
from tasks.base import cache_folder
from trainer.auto import EAGER, SETUP_SECONDS, TAKING_OVER, Knowledge
from trainer.telemetry.files import finite, written_whole

FORMAT = 5
"""Raised when the meaning of what is kept changes; files of another format count as none."""
NO_TIME = frozenset({"learning_rate", "lr", "initial_lr", "max_epochs", "max_steps", "seed"})
"""Names of what changes how much is learned, and no step's time: another run of the same program may choose by it."""


def memory_of(fingerprint: str) -> Path:
    """The file of the program with this fingerprint, in the user's cache directory."""
    return cache_folder() / "auto" / f"{fingerprint[:32]}.json"


def recall(file: Path, knowledge: Knowledge) -> str | None:
    """Fill in what earlier runs measured; returns when the newest of this program did, None where none has."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            return None
        here = cache_directories()["TORCHINDUCTOR_CACHE_DIR"]
        warm = kept["cache_directory"] == str(here) and here.is_dir() and any(here.iterdir())
        for arm in knowledge.arms.values():
            if (values := kept["arms"].get(arm.name)) is None:
                continue
            arm.step_seconds, setup = values["step_seconds"], values["setup_seconds"]
            arm.failed, arm.cached = arm.failed or values["failed"], warm and bool(setup)
            if setup is not None and arm.module != EAGER:  # that run may have compiled what is there now, or found it
                loads, compiles = SETUP_SECONDS[TAKING_OVER.format(arm.module)], SETUP_SECONDS[arm.module]
                setup = min(setup, loads) if warm else max(setup, compiles)
            arm.setup_seconds = setup
        return str(kept["written"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # none yet, or damaged: measured anew and written over


def keep(file: Path, knowledge: Knowledge) -> str | None:
    """Write what this run knows; returns why it could not, None when it could."""
    values = {
        "format": FORMAT,
        "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        "cache_directory": str(cache_directories()["TORCHINDUCTOR_CACHE_DIR"]),
        "arms": {
            arm.name: {name: getattr(arm, name) for name in ("step_seconds", "setup_seconds", "failed")}
            for arm in knowledge.arms.values()
            if arm.step_seconds is not None or arm.failed is not None
        },
    }
    try:
        with written_whole(file, "w") as opened:
            json.dump(finite(values), opened, indent=1, allow_nan=False)
    except OSError as error:
        return f"{file.parent}: {error.strerror or error}"
    return None


def program_facts(program: Program) -> dict[str, Any]:
    """Plain attributes of every module and options of every optimizer; ``facts_of`` has classes and sizes. What lies
    deeper, in an object that a module holds, is not looked at."""
    return {
        "modules": {path: _plain(vars(child)) for path, child in program.module.named_modules()},
        "optimizers": [[type(one).__qualname__, _plain(one.defaults)] for one in program.optimizers],
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in sorted(values.items()) if name not in NO_TIME}
    named = {name: getattr(value, "__qualname__", value) for name, value in plain.items()}
    return {name: value for name, value in named.items() if isinstance(value, (bool, int, float, str))}
