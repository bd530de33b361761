"""What all processes of a training must have alike: versions, code, parameters, settings."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from strategies.compile_errors import origin_of
from trainer.loops.distributed import host_group

ROOT = Path(__file__).parents[2]


def describe_process(rank: int, pid: int | None = None) -> str:
    """A process in words: its rank, its host and its number there."""
    return f"{rank} ({socket.gethostname()}, pid {pid or os.getpid()})"


def compare_facts(rank: int, facts: Mapping[str, str]) -> None:
    """All processes call it. Raises ValueError, in all alike, where ``facts`` (by name) differ between them."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (describe_process(rank), dict(facts)), group=host_group())
    of_first, first = gathered[0]
    for name, theirs in gathered:
        for what in {**first, **theirs}:
            if first.get(what) != theirs.get(what):
                raise ValueError(
                    f"rank {name} has {what} {theirs.get(what)}, rank {of_first} has {first.get(what)}: all processes "
                    "of a training need the same"
                )


def code_of(module: nn.Module) -> dict[str, str]:
    """Checksums of the files that hold the code of ``module`` and of this project, by what they are."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    own = sorted(file for file in files if file and origin_of(file) == "other")
    sums = {f"code of {Path(file).name}": checksum(Path(file)) for file in own}
    here = [file for name in ("strategies", "trainer") for file in (ROOT / name).rglob("*.py")]
    return {"this project's code": checksum(*here), **sums}


def checksum(*files: Path) -> str:
    """Of what ``files`` hold, eight digits; a file that cannot be read counts as empty."""
    total = 0
    for file in sorted(files):
        with contextlib.suppress(OSError):
            total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"
