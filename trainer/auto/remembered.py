"""Remembered decisions: what earlier runs of the same program on the same machine measured, a small JSON file each."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from strategies.toolchain import cache_directories
from tasks.data.cache_files import cache_folder
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
