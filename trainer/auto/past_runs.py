"""What earlier runs of the same program on the same machine measured: a small JSON file for each program."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from strategies.cached.cache_session import facts_of, fingerprint_of
from strategies.compile_options import cache_directories
from strategies.loop_protocol import Loop
from tasks.base import cache_folder
from trainer.auto.rule import CACHED_SECONDS, CAPTURE_SECONDS, DERIVING, EAGER, Timings
from trainer.telemetry.serialization import nan_to_none, written_whole

FORMAT = 6
"""Raised when the meaning of what is kept changes; files of another format count as none."""
NO_TIME = frozenset({"learning_rate", "lr", "initial_lr", "max_epochs", "max_steps", "seed"})
"""Names of what changes how much is learned, and no step's time: another run of the same program may choose by it."""


def timings_file(program: Program, loop: Loop, batch: Any, *, leave_out: str) -> Path:
    """The file of the program that trains on batches like ``batch`` in ``loop``, in the user's cache directory; the
    strategy named ``leave_out`` chooses."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    facts = {
        **facts_of(program, leave_out=leave_out),
        **program_facts(program),
        "batch": [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors],
        "processes": loop.world_size,
        "micro_batches": loop.micro_batches,
    }
    return cache_folder() / "auto" / f"{fingerprint_of(facts)[:32]}.json"


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


def load_timings(timings: Timings, file: Path) -> str | None:
    """Fill in what earlier runs measured; returns when the newest of this program did, None where none has."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            return None
        here = cache_directories()["TORCHINDUCTOR_CACHE_DIR"]
        warm = kept["cache_directory"] == str(here) and here.is_dir() and any(here.iterdir())
        if any(name.startswith(DERIVING) for name in kept["arms"]):
            timings.take_in(DERIVING, captures=(EAGER, True) in timings.arms)
        for arm in timings.arms.values():
            if (values := kept["arms"].get(arm.name)) is None:
                continue
            arm.step_seconds, setup, arm.failed = values["step_seconds"], values["setup_seconds"], values["failed"]
            if setup is not None and arm.module != EAGER:  # that run may have compiled what is there now, or found it
                setup = min(setup, CACHED_SECONDS) if warm else None
                timings.cached |= {arm.module} if warm else set()
            arm.setup_seconds = setup
        return str(kept["written"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # none yet, or damaged: measured anew and written over


def save_timings(timings: Timings, file: Path) -> str | None:
    """Write what this run knows; returns why it could not, None when it could."""
    captures = CAPTURE_SECONDS * (len(timings.shapes) - 1 + timings.new_shapes(10**6))
    arms = {}
    for arm in timings.arms.values():
        if arm.step_seconds is not None or arm.failed is not None:
            setup = arm.setup_seconds
            if arm.captured and setup is not None:  # the next run captures every shape, also those since the trial
                setup = max(setup, captures)
            arms[arm.name] = {"step_seconds": arm.step_seconds, "setup_seconds": setup, "failed": arm.failed}
    values = {
        "format": FORMAT,
        "written": datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        "cache_directory": str(cache_directories()["TORCHINDUCTOR_CACHE_DIR"]),
        "arms": arms,
    }
    try:
        with written_whole(file, "w") as opened:
            json.dump(nan_to_none(values), opened, indent=1, allow_nan=False)
    except OSError as error:
        return f"{file.parent}: {error.strerror or error}"
    return None
