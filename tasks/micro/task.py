"""Micro: small networks on generated data, for what compiling gains or costs where little or nothing repeats."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import (
    MIN_EXAMPLE_BYTES,
    BatchCounts,
    Declaration,
    TrainedTask,
    require_at_least,
    require_fields,
    require_memory,
    suggest,
)

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn


CLASSES = 10
"""Outputs of every micro model."""
OPTIONAL = {"image_size": "image_size", "positions": "positions", "layers": "layers", "pad_to": "layers"}
"""Options that only models with some dimension have, and that dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroSize:
    """What one micro model is built from; None: it has no such dimension."""

    batch_size: int
    """Examples in a batch."""
    width: int
    """Features of a layer: of every layer, or channels of the first convolution."""
    image_size: int | None = None
    """Rows and columns of an image, pixels."""
    positions: int | None = None
    """Positions of a sequence; of the longest one where they are ragged."""
    layers: int | None = None
    """Repeated blocks."""

    @property
    def example_shape(self) -> tuple[int, ...]:
        """Of one input: an image; positions and features; or features."""
        if self.image_size is not None:
            return 3, self.image_size, self.image_size
        return (self.width,) if self.positions is None else (self.positions, self.width)


DEFAULTS: dict[str, MicroSize] = {
    "simple_linear": MicroSize(batch_size=32, width=512),
    "convnet": MicroSize(batch_size=32, width=64, image_size=224),
    "transformer_block": MicroSize(batch_size=32, width=512, positions=128),
    "graph_breaker": MicroSize(batch_size=32, width=512),
    "ragged": MicroSize(batch_size=32, width=256, positions=512, layers=4),
}
"""Each model at its default size. The quoted benchmark gives a batch of 32, images of 224x224 and no other number."""


@dataclass(kw_only=True, slots=True)
class Micro(TrainedTask):
    """One small network, by name: classes of random inputs, learned from generated data."""

    name: ClassVar[str] = "micro"
    monitor: ClassVar[str | None] = "val/loss"

    model: str = "simple_linear"
    """``simple_linear``, ``convnet``, ``transformer_block``, ``graph_breaker`` or ``ragged``: docs/tasks/micro.md."""
    batch_size: int | None = None
    """Examples in a batch on each device; None: 32."""
    width: int | None = None
    """Features of every layer; of ``convnet`` channels of the first convolution. None: 512, but 256 for ``ragged`` and
    64 for ``convnet``."""
    image_size: int | None = None
    """Rows and columns of an image of ``convnet``, pixels. None: 224."""
    positions: int | None = None
    """Positions of a sequence, for ``ragged`` of the longest one. None: 128 for ``transformer_block``, 512 for
    ``ragged``, whose median is a quarter of it."""
    layers: int | None = None
    """Blocks of ``ragged``; None: 4."""
    pad_to: int | None = None
    """Positions of every batch of ``ragged``; None: as many as the longest sequence of the batch has."""
    train_examples: int | None = None
    """Generated training examples, all in the device's memory; None: 16 batches."""
    val_examples: int | None = None
    """Generated validation examples, none of them a training example; None: 2 batches."""

    def __post_init__(self) -> None:
        TrainedTask.__post_init__(self)
        if self.model not in DEFAULTS:
            raise ValueError(
                f"task.model={self.model!r} is not one of {tuple(DEFAULTS)}{suggest(self.model, DEFAULTS)}"
            )
        for name, dimension in OPTIONAL.items():
            if getattr(self, name) is not None and getattr(DEFAULTS[self.model], dimension) is None:
                having = ", ".join(model for model, size in DEFAULTS.items() if getattr(size, dimension) is not None)
                raise ValueError(f"task.{name}={getattr(self, name)}: task.model={self.model} has none ({having} do)")
        require_fields("task", self, batch_size=1, width=1, layers=1, train_examples=1, val_examples=1)
        require_fields("task", self, image_size=8, positions=4)
        if self.pad_to is not None and self.size.positions is not None:
            require_at_least("task.pad_to", self.pad_to, self.size.positions)
        if self.train_examples is not None and self.train_examples < self.size.batch_size:
            raise ValueError(
                f"task.train_examples={self.train_examples} must be at least task.batch_size={self.size.batch_size}"
            )

    @property
    def title(self) -> str:
        """``micro ragged``: the models have little in common."""
        return f"{self.name} {self.model}"

    @property
    def size(self) -> MicroSize:
        """The model's dimensions: its own, but for those that are set."""
        default = DEFAULTS[self.model]
        given = {name: getattr(self, name) for name in MicroSize.__dataclass_fields__}
        return replace(default, **{name: value for name, value in given.items() if value is not None})

    @property
    def counts(self) -> dict[str, int]:
        batch_size = self.size.batch_size
        return {"train": self.train_examples or 16 * batch_size, "val": self.val_examples or 2 * batch_size}

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.micro.data import GeneratedSequences, GeneratedTensors

        counts, size = self.counts, self.size
        # Of tensors float32, and a key of each.
        needed = MIN_EXAMPLE_BYTES + (0 if self.model == "ragged" else 4 * math.prod(size.example_shape))
        held = f"task.batch_size={size.batch_size}, " + ", ".join(f"task.{k}_examples={n}" for k, n in counts.items())
        require_memory(held, needed * sum(counts.values()))
        return (GeneratedSequences if self.model == "ragged" else GeneratedTensors)(self, seed=seed)

    def build_net(self) -> nn.Module:
        import torch

        from tasks.micro.model import NETWORKS

        size = self.size
        net: nn.Module = NETWORKS[self.model](size, CLASSES)
        # What cuDNN is fast with; a compiler would choose it by itself, and eager should not lose by that.
        return net if size.image_size is None else net.to(memory_format=torch.channels_last)

    def default_learning_rate(self) -> float:
        """Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return min(3e-3, 0.5 / self.size.width)

    def declare(self) -> Declaration:
        """The whole network as one part, as hardly anything repeats; of ``ragged`` its blocks, and the tail apart."""
        if self.model != "ragged":
            return Declaration(whole=("net",), parts=("net",))
        from tasks.loading import PAD
        from tasks.module import IGNORED

        return Declaration(
            whole=("net",),
            blocks=("net.blocks",),
            parts=("net.tail",),
            ragged=(("inputs", 1, PAD, 0), ("targets", 1, IGNORED, 0)),
        )

    def count(self, batch: Any) -> BatchCounts:
        tokens = batch.targets.numel() if batch.targets.ndim == 2 else None
        return BatchCounts(samples=batch.targets.shape[0], tokens=tokens, useful_tokens=batch.useful_tokens)

    def max_positions(self) -> int | None:
        return self.size.positions

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        if self.model == "ragged":
            tokens = torch.zeros(rows, positions, dtype=torch.long)
            return tokens, tokens
        if self.size.positions is not None:
            return torch.zeros(rows, positions, self.size.width), torch.zeros(rows, positions, dtype=torch.long)
        return torch.zeros(rows, *self.size.example_shape), torch.zeros(rows, dtype=torch.long)

    def counting(self) -> AbstractContextManager[Any]:
        """The graph breaker branches on values: it needs some."""
        return nullcontext() if self.model == "graph_breaker" else TrainedTask.counting(self)
