"""Generated data, in memory: inputs of one shape with classes that can be learned, and ragged sequences of tokens.

Every class has a fixed random pattern, and an input is its class' pattern in noise; every token has a fixed random
class. Patterns and classes depend on the seed, example ``i`` on the seed and ``i`` alone.

Shape letters: B batch, S positions, K classes, ... the shape of an input.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.micro import CLASSES, VOCABULARY
from tasks.resumable_data import ResumableDataModule, pad_rows
from tasks.special_tokens import IGNORED

PATTERN_NORM = 4.0
"""Norm of a vector's pattern, in standard deviations of the noise: easy to tell apart once the patterns are known."""
CELLS = 4
"""Rows and columns of fields in an image's pattern."""
SHORTEST = 4
"""Tokens of the shortest sequence."""
SPREAD = 0.6
"""Standard deviation of the logarithm of a sequence's length, as documents and sentences have it."""


class GeneratedBatch(NamedTuple):
    """What the module takes."""

    inputs: Tensor
    """float32 [B, ...], images in channels_last memory; or tokens, int64 [B, S]. See ``GeneratedTensors`` for what a
    loader yields."""
    targets: Tensor
    """Class of each input, or of each position of it: int64 [B] or [B, S]; padding is ignored."""
    useful_tokens: int | None
    """Positions that are not padding; None where inputs are no sequences."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        return ("useful_tokens",)


def generator(key: str) -> torch.Generator:
    """A generator of random numbers for ``key``, the same in every process (``hash()`` is not)."""
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


class GeneratedTensors(ResumableDataModule):
    """Inputs of one shape. They lie on the device that trains, all of them, and the loader hands out their numbers,
    which become inputs where Lightning moves a batch to its device.

    A batch of images takes longer to be gathered and copied by the host than a GPU takes to train on it.
    """

    option = "task"

    def open(self) -> None:
        counts, shape = self.task.counts, self.task.example_shape
        patterns = class_patterns(shape, classes=CLASSES, seed=self.seed)
        keys = [f"{self.seed}/{split}/{index}" for split, count in counts.items() for index in range(count)]
        inputs, targets = noisy_examples(patterns, shape, keys=keys)
        if len(shape) == 3:
            # Rows of channels, so that a batch of images is channels_last, the layout of fast convolutions.
            inputs = inputs.permute(0, 2, 3, 1).contiguous()
        self._inputs, self._targets = inputs, targets
        self._pools: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """Inputs and targets by device, inputs in the precision that trains."""
        self.collate = self._numbered
        # Numbers of examples, in the place of the examples themselves.
        train_count = counts["train"]
        self.train_set, self.val_set = range(train_count), range(train_count, len(keys))

    def _numbered(self, numbers: Sequence[int]) -> GeneratedBatch:
        numbers_B = torch.tensor(numbers)
        targets = self._targets[numbers_B]
        return GeneratedBatch(numbers_B, targets, targets.numel() if targets.ndim == 2 else None)

    def transfer_batch_to_device(
        self, batch: GeneratedBatch, device: torch.device, dataloader_idx: int
    ) -> GeneratedBatch:
        """Gather the inputs of ``batch`` on ``device``."""
        if device not in self._pools:
            inputs = self._inputs.to(device)
            if self.trainer is not None:
                # Lightning converts a batch before it is moved, when these inputs are not there yet.
                inputs = self.trainer.precision_plugin.convert_input(inputs)
            self._pools[device] = inputs, self._targets.to(device)
        numbers = batch.inputs.to(device, non_blocking=True)
        inputs, targets = (pool.index_select(0, numbers) for pool in self._pools[device])
        if inputs.ndim == 4:
            inputs = inputs.permute(0, 3, 1, 2)
        return batch._replace(inputs=inputs, targets=targets)


def class_patterns(shape: tuple[int, ...], *, classes: int, seed: int) -> Tensor:
    """What an input (or position) of each class looks like without noise: float32 [K, ...].

    Vectors have the norm ``PATTERN_NORM``; images are ``CELLS`` x ``CELLS`` fields of one colour each.
    """
    draw = generator(f"{seed}/patterns")
    if len(shape) == 3:
        fields = torch.randn(classes, shape[0], CELLS, CELLS, generator=draw)
        return torch.nn.functional.interpolate(fields, size=shape[1:], mode="nearest")
    patterns = torch.randn(classes, shape[-1], generator=draw)
    return patterns * (PATTERN_NORM / patterns.norm(dim=1, keepdim=True))


def noisy_examples(patterns: Tensor, shape: tuple[int, ...], *, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """An example for each key: float32 inputs [N, ...] and the classes, int64, [N] or [N, S], that they were made from.

    Each is drawn by itself, in place: an operation more is one more for each of some thousand examples.
    """
    classes = torch.empty(len(keys), *(shape[:1] if len(shape) == 2 else ()), dtype=torch.int64)
    inputs = torch.empty(len(keys), *shape)
    draw = torch.Generator()
    for key, its_classes, its_input in zip(keys, classes.unbind(), inputs.unbind(), strict=True):
        draw.manual_seed(zlib.crc32(key.encode()))
        torch.randint(0, len(patterns), its_classes.shape, generator=draw, out=its_classes)
        torch.randn(shape, generator=draw, out=its_input)
    return inputs.add_(patterns[classes]), classes


class GeneratedSequences(ResumableDataModule):
    """Sequences of ragged lengths, padded to the longest of their batch."""

    option = "task"

    def open(self) -> None:
        self.collate = self._padded
        class_of = torch.randint(0, CLASSES, (VOCABULARY,), generator=generator(f"{self.seed}/classes"))
        self.train_set, self.val_set = (
            Sequences(self._example(f"{self.seed}/{split}/{index}", class_of) for index in range(count))
            for split, count in self.task.counts.items()
        )

    def _example(self, key: str, class_of: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, none of them padding, and their classes; lengths are lognormal, the median a quarter of the most."""
        longest = self.task.positions
        length = round(random.Random(key).lognormvariate(0.0, SPREAD) * longest / 4)
        tokens = torch.randint(1, VOCABULARY, (min(max(length, SHORTEST), longest),), generator=generator(key))
        return tokens, class_of[tokens]

    def _padded(self, items: Sequence[tuple[Tensor, Tensor]]) -> GeneratedBatch:
        tokens, targets = zip(*items, strict=True)
        return GeneratedBatch(
            pad_rows(tokens, width=self.task.pad_to),
            pad_rows(targets, width=self.task.pad_to, padding=IGNORED),
            sum(len(row) for row in tokens),
        )


class Sequences(list[tuple[Tensor, Tensor]]):
    """Pairs of tokens and their classes, both int64 [S]."""

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens, _ in self]
