"""The processes of one training: what they agree on, and what all of them must have alike.

They agree over gloo, from host to host: no device is waited for, and a broken one is not in the way.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from strategies.compile_errors import origin_of
from strategies.loop_protocol import Value, gathered, host_group
from trainer.loops.lightning_internals import on_sigterm, received_sigterm

ROOT = Path(__file__).parents[2]


UNKNOWN = 2**62
"""In the place of a number of batches."""


def max_over_ranks(value: int, world_size: int) -> int:
    """The largest ``value`` of all ``world_size`` processes that train together, once each has called this."""
    if world_size == 1:
        return int(value)
    tensor = torch.tensor(int(value))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, host_group())
    return int(tensor)


class RankReductions:
    """What all loops do alike; see ``Loop`` for what the members mean."""

    world_size: int
    step_function: Callable[..., Any] | None = None

    def any_rank(self, flag: bool) -> bool:
        return bool(max_over_ranks(flag, self.world_size))

    def all_ranks(self, flag: bool) -> bool:
        return not self.any_rank(not flag)

    def min_over_ranks(self, value: int) -> int:
        return -max_over_ranks(-value, self.world_size)

    def broadcast(self, value: Value) -> Value:
        return value if self.world_size == 1 else gathered(value)[0]


class Agreement:
    """Flags that all processes hold up once a step and read one step later, so that all act at the same step.

    Made by all processes alike, inside a process group. A process that is less than a step behind is not waited for.
    """

    def __init__(self) -> None:
        self._group = host_group()
        self._sent: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, *flags: int) -> tuple[int, ...]:
        """Hold up ``flags``; returns the largest of each, of all processes, from the call before: zeros at first.

        Every process calls it at the same steps. Raises RuntimeError where one of them is gone.
        """
        before = self.wait() or (0,) * len(flags)
        tensor = torch.tensor(flags)
        self._sent = tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
        return before

    def wait(self) -> tuple[int, ...]:
        """The flags that are on their way, once all processes have held up theirs; empty without any."""
        if self._sent is None:
            return ()
        tensor, work = self._sent
        self._sent = None
        work.wait()
        return tuple(tensor.tolist())


class SigtermAgreement(Agreement):
    """Ends ``trainer``'s training by a SIGTERM at one step of all processes, in place of Lightning's own way.

    Lightning's reads a flag of the first process from the device in each step, which the host then waits for.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__()
        self._trainer, self._asked = trainer, False
        on_sigterm(trainer, self._notice, self._end_where_asked)

    def _notice(self, signum: int, _: Any) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self._asked and launcher is not None:
            launcher.kill(signum)
        self._asked = True

    def _end_where_asked(self) -> None:
        if any(self.exchange(self._asked)):
            raise received_sigterm(self._trainer)


class EpochEnds:
    """Ends each epoch at the same batch in all processes, where one of them has fewer batches than others, or nobody
    knows how many. Else the others would wait for it in a step that it never takes.

    Raises ValueError where a process has none at all.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._agreement = trainer, Agreement()

    def batch_begins(self) -> None:
        """It may be the last one here."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        self._agreement.exchange(progress.is_last_batch)
        if self._trainer.accumulate_grad_batches > 1:  # the last batch takes an optimizer step in any case
            self.batch_ends()

    def batch_ends(self) -> None:
        """It was the last one where it was so anywhere."""
        if flags := self._agreement.wait():
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = bool(flags[0])

    def epoch_ends(self) -> None:
        """Without a batch, this process has asked nobody."""
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            raise ValueError(f"rank {self._trainer.global_rank} has no batch in epoch {self._trainer.current_epoch}")


def epoch_ends(trainer: L.Trainer) -> EpochEnds | None:
    """What ends epochs alike; None where all processes have as many batches."""

    def least_and_most(number: float | None) -> tuple[float, float]:
        whole = UNKNOWN if number in (None, math.inf) else int(number)
        return -max_over_ranks(-whole, trainer.world_size), max_over_ranks(whole, trainer.world_size)

    if trainer.world_size == 1:
        return None
    least, most = least_and_most(trainer.num_training_batches)
    earliest, latest = least_and_most(trainer.val_check_batch)
    if earliest < latest:  # a share of different numbers
        trainer.val_check_batch = earliest
    return None if least == most < UNKNOWN else EpochEnds(trainer)


# ---- what all must have alike ----------------------------------------------------------------------------------------


def describe_process(rank: int, pid: int | None = None) -> str:
    """A process in words: its rank, its host and its number there."""
    return f"{rank} ({socket.gethostname()}, pid {pid or os.getpid()})"


def compare_facts(rank: int, facts: Mapping[str, str]) -> None:
    """All processes call it. Raises ValueError, in all alike, where ``facts`` (by name) differ between them."""
    every = gathered((describe_process(rank), dict(facts)))
    of_first, first = every[0]
    for name, theirs in every:
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
