"""Generated sequences: random tokens in ragged lengths, each of a fixed random class, held in memory.

Classes depend on the seed, sequence ``i`` on the seed and ``i`` alone.

Shape letters: B batch, S positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.data.generated import GeneratedBatch, generator
from tasks.data.loading import Loading
from tasks.data.resumable import ResumableDataModule

PAD = 0
"""Token id of padding."""
VOCABULARY = 256
"""Token ids of ragged sequences, padding among them."""
SHORTEST = 4
"""Tokens of the shortest sequence."""
SPREAD = 0.6
"""Standard deviation of the logarithm of a sequence's length, as documents and sentences have it."""


class GeneratedSequences(ResumableDataModule):
    """Sequences of ragged lengths, padded to the longest of their batch."""

    option = "task"

    def __init__(
        self,
        loading: Loading,
        *,
        longest: int,
        pad_to: int | None,
        classes: int,
        ignored: int,
        train_count: int,
        val_count: int,
        seed: int,
    ) -> None:
        """``longest``: most positions of a sequence; ``pad_to``: of every batch; ``ignored``: target of padding."""
        super().__init__(loading, seed=seed)
        self._longest, self._classes, self._ignored = longest, classes, ignored
        self._pad_to = pad_to
        self._counts = {"train": train_count, "val": val_count}
        self.collate = self._padded

    def open(self) -> str:
        """Generate all sequences."""
        class_of = torch.randint(0, self._classes, (VOCABULARY,), generator=generator(f"{self.seed}/classes"))
        self.train_set, self.val_set = (
            Sequences([self._tokens(f"{self.seed}/{split}/{index}") for index in range(count)], class_of)
            for split, count in self._counts.items()
        )
        return "the generated sequences"

    def transfer_batch_to_device(
        self, batch: GeneratedBatch, device: torch.device, dataloader_idx: int
    ) -> GeneratedBatch:
        """Move the two tensors without waiting for the copy; the count stays on the host."""
        return batch._replace(
            inputs=batch.inputs.to(device, non_blocking=True), targets=batch.targets.to(device, non_blocking=True)
        )

    def _tokens(self, key: str) -> Tensor:
        return ragged_tokens(key, longest=self._longest)

    def _padded(self, items: Sequence[tuple[Tensor, Tensor]]) -> GeneratedBatch:
        lengths = [len(tokens) for tokens, _ in items]
        positions = max(lengths) if self._pad_to is None else self._pad_to
        tokens_BS = torch.full((len(items), positions), PAD)
        targets_BS = torch.full((len(items), positions), self._ignored)
        for row, (tokens, targets) in enumerate(items):
            tokens_BS[row, : lengths[row]] = tokens
            targets_BS[row, : lengths[row]] = targets
        return GeneratedBatch(tokens_BS, targets_BS, sum(lengths))


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of tokens and their classes, both int64 [S]."""

    def __init__(self, tokens: list[Tensor], class_of: Tensor) -> None:
        self._tokens, self._class_of = tokens, class_of
        self.lengths = [len(sequence) for sequence in tokens]

    def __len__(self) -> int:
        """Sequences."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Sequence ``index``, the same in every run of one seed."""
        return self._tokens[index], self._class_of[self._tokens[index]]


def ragged_tokens(key: str, *, longest: int) -> Tensor:
    """Tokens int64 [S], none of them padding; lengths are lognormal with a quarter of ``longest`` as their median."""
    length = round(random.Random(key).lognormvariate(0.0, SPREAD) * longest / 4)
    return torch.randint(1, VOCABULARY, (min(max(length, SHORTEST), longest),), generator=generator(key))
