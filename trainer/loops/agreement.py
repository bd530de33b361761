"""What processes agree on over gloo, from host to host: no device is waited for, and a broken one is not in the way."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainer.loops.private import on_sigterm

UNKNOWN = 2**62
"""In the place of a number of batches."""

_made: tuple[object, dist.ProcessGroup] | None = None


def host_group() -> dist.ProcessGroup:
    """A gloo group of all processes beside the one that trains, made once for each of those; all processes call it."""
    global _made
    if _made is None or _made[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        _made = dist.group.WORLD, group
    return _made[1]


def largest(value: int, world_size: int) -> int:
    """The largest ``value`` of all ``world_size`` processes that train together, once each has called this."""
    if world_size == 1:
        return int(value)
    tensor = torch.tensor(int(value))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, host_group())
    return int(tensor)


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
        before = self.settle() or (0,) * len(flags)
        tensor = torch.tensor(flags)
        self._sent = tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
        return before

    def settle(self) -> tuple[int, ...]:
        """The flags that are on their way, once all processes have held up theirs; empty without any."""
        if self._sent is None:
            return ()
        tensor, work = self._sent
        self._sent = None
        work.wait()
        return tuple(tensor.tolist())


class SigtermAgreement:
    """Ends ``trainer``'s training by a SIGTERM at one step of all processes, in place of Lightning's own way.

    Lightning's reads a flag of the first process from the device in each step, which the host then waits for.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._asked = trainer, False
        self._agreement: Agreement | None = None
        on_sigterm(trainer, self._notice, self._exchange)

    def _notice(self, signum: int, _: Any) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self._asked and launcher is not None:
            launcher.kill(signum)
        self._asked = True

    def _exchange(self) -> None:
        self._agreement = self._agreement or Agreement()
        if any(self._agreement.exchange(self._asked)):
            raise SIGTERMException

    def settle(self) -> None:
        """Wait for what is on its way: no step comes any more."""
        if self._agreement is not None:
            self._agreement.settle()


class EpochEnds:
    """Ends each epoch of a training at the same batch in all processes, where one of them has fewer batches than
    others, or nobody knows how many: else the others would wait for it in a step that it never takes.

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
        if said := self._agreement.settle():
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = bool(said[0])

    def epoch_ends(self) -> None:
        """Without a batch, this process has asked nobody."""
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            raise ValueError(f"rank {self._trainer.global_rank} has no batch in epoch {self._trainer.current_epoch}")


def epoch_ends(trainer: L.Trainer) -> EpochEnds | None:
    """What ends epochs alike; None where all processes have as many batches."""

    def least_and_most(number: float | None) -> tuple[float, float]:
        whole = UNKNOWN if number in (None, math.inf) else int(number)
        return -largest(-whole, trainer.world_size), largest(whole, trainer.world_size)

    if trainer.world_size == 1:
        return None
    least, most = least_and_most(trainer.num_training_batches)
    earliest, latest = least_and_most(trainer.val_check_batch)
    if earliest < latest:  # a share of different numbers
        trainer.val_check_batch = earliest
    return None if least == most < UNKNOWN else EpochEnds(trainer)
