"""Order of training examples that a resumed run continues exactly where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ResumableSampler(DistributedSampler[int]):
    """A permutation by seed and epoch, split over ranks, that can start within an epoch.

    It is a DistributedSampler so that Lightning keeps it and tells it the epoch; it needs no process group.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
    ) -> None:
        """``batch_size``: examples a batch on one rank, the unit in which ``resume`` counts."""
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.batch_size = batch_size
        self._resume_epoch = 0
        self._resume_batches = 0

    def resume(self, *, epoch: int, batches: int) -> None:
        """Start at ``batches`` batches into ``epoch``; later epochs are whole."""
        self._resume_epoch, self._resume_batches = epoch, batches

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's examples of the epoch, without the batches that were trained on before."""
        # Lightning builds the first iterator before it has advanced past an epoch that a checkpoint completed: the
        # epoch it tells may be one behind the one to resume in, never ahead of it. Asking again changes nothing.
        epoch = max(self.epoch, self._resume_epoch)
        batches = self._resume_batches if epoch == self._resume_epoch else 0
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator).tolist()
        else:
            order = list(range(count))
        # Every rank draws equally many examples: the last ones begin again at the front.
        order = (order * -(-self.total_size // max(1, count)))[: self.total_size]
        return iter(order[self.rank : self.total_size : self.num_replicas][batches * self.batch_size :])


class ResumableLoader(DataLoader[Any]):
    """A loader over a ResumableSampler with the state hooks that Lightning looks for before it calls one resumable."""

    position: Callable[[], dict[str, int]]
    """Where training stands, ``{"epoch", "batches"}``; only the training loop knows, the loader fetches ahead."""

    def state_dict(self) -> dict[str, int]:
        """Epoch, and batches of it that were trained on."""
        return self.position()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next iterator start there."""
        assert isinstance(self.sampler, ResumableSampler)
        self.sampler.resume(epoch=state_dict["epoch"], batches=state_dict["batches"])
