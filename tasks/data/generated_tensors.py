"""Generated tensors: random inputs of one shape with classes that can be learned, in the memory of the device.

Every class has a fixed random pattern, and an input is its class' pattern in noise. Patterns depend on the seed,
example ``i`` on the seed and ``i`` alone.

Shape letters: S positions, K classes, ... the shape of an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.data.generated import GeneratedBatch, generator, seed_of
from tasks.data.loading import Loading
from tasks.data.resumable import ResumableDataModule

PATTERN_NORM = 4.0
"""Norm of a vector's pattern, in standard deviations of the noise: easy to tell apart once the patterns are known."""
CELLS = 4
"""Rows and columns of fields in an image's pattern."""


class GeneratedTensors(ResumableDataModule):
    """Inputs of one shape. They lie on the device that trains, all of them, and the loader hands out their numbers,
    which become inputs where Lightning moves a batch to its device.

    A batch of images takes longer to be gathered and copied by the host than a GPU takes to train on it.
    """

    option = "task"

    def __init__(
        self, loading: Loading, *, shape: tuple[int, ...], classes: int, train_count: int, val_count: int, seed: int
    ) -> None:
        """``shape``: of an input: features; positions and features, each position of its own class; or an image."""
        super().__init__(loading, seed=seed)
        self._shape, self._classes = shape, classes
        self._train_count, self._val_count = train_count, val_count
        self._pools: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """Inputs and targets by device, inputs in the precision that trains."""
        self.collate = self._numbered

    def open(self) -> str:
        """Generate all examples."""
        patterns = class_patterns(self._shape, classes=self._classes, seed=self.seed)
        keys = [
            f"{self.seed}/{split}/{index}"
            for split, count in (("train", self._train_count), ("val", self._val_count))
            for index in range(count)
        ]
        inputs, targets = noisy_examples(patterns, self._shape, keys=keys)
        if len(self._shape) == 3:
            # Rows of channels, so that a batch of images is channels_last, the layout of fast convolutions.
            inputs = inputs.permute(0, 2, 3, 1).contiguous()
        self._inputs, self._targets = inputs, targets
        self.train_set = Numbers(range(self._train_count))
        self.val_set = Numbers(range(self._train_count, len(keys)))
        return "the generated data"

    def _numbered(self, numbers: Sequence[int]) -> GeneratedBatch:
        """A batch whose inputs are still the numbers of its examples."""
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
        if len(self._shape) == 3:
            inputs = inputs.permute(0, 3, 1, 2)
        return batch._replace(inputs=inputs, targets=targets)


class Numbers(Dataset[int]):
    """Numbers of examples, in the place of the examples themselves."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        """Examples."""
        return len(self._numbers)

    def __getitem__(self, index: int) -> int:
        """The example's number."""
        return self._numbers[index]


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
        draw.manual_seed(seed_of(key))
        torch.randint(0, len(patterns), its_classes.shape, generator=draw, out=its_classes)
        torch.randn(shape, generator=draw, out=its_input)
    return inputs.add_(patterns[classes]), classes
