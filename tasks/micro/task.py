"""Micro: small networks on generated data, for what compiling gains or costs where little or nothing repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, Loading, Ragged, TrainedTask, require_fields, require_memory, suggest
from tasks.special_tokens import IGNORED, PAD

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn


DIMENSIONS: dict[str, dict[str, int | None]] = {
    "simple_linear": {"width": 512},
    "convnet": {"width": 64, "image_size": 224},
    "transformer_block": {"width": 512, "positions": 128},
    "graph_breaker": {"width": 512},
    "ragged": {"width": 256, "positions": 512, "layers": 4, "pad_to": None},
}
"""Each model's own options and their defaults; the quoted benchmark gives a batch of 32, 224x224 and nothing else."""


@dataclass(kw_only=True, slots=True)
class Micro(TrainedTask):
    """One small network, by name: classes of random inputs, learned from generated data."""

    name: ClassVar[str] = "micro"

    model: str = "simple_linear"
    """``simple_linear``, ``convnet``, ``transformer_block``, ``graph_breaker`` or ``ragged``: docs/tasks/micro.md."""
    batch_size: int = 32
    """Examples in a batch on each device."""
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
        if self.model not in DIMENSIONS:
            raise ValueError(
                f"task.model={self.model!r} is not one of {tuple(DIMENSIONS)}{suggest(self.model, DIMENSIONS)}"
            )
        its = DIMENSIONS[self.model]
        for name in ("image_size", "positions", "layers", "pad_to"):
            if getattr(self, name) is not None and name not in its:
                raise ValueError(f"task.{name}={getattr(self, name)}: task.model={self.model} has none")
        for name, default in its.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        require_fields("task", self, batch_size=1, width=1, layers=1, train_examples=self.batch_size, val_examples=1)
        require_fields("task", self, image_size=8, positions=4, pad_to=self.positions or 0)

    @property
    def title(self) -> str:
        """``micro ragged``: the models have little in common."""
        return f"{self.name} {self.model}"

    @property
    def example_shape(self) -> tuple[int, ...]:
        """Of one input: an image; positions and features; or features."""
        if self.image_size is not None:
            return 3, self.image_size, self.image_size
        assert self.width is not None
        return (self.width,) if self.positions is None else (self.positions, self.width)

    @property
    def data(self) -> Loading:
        """Without worker processes: what is in memory already would only be copied between them."""
        return Loading(batch_size=self.batch_size, num_workers=0)

    @property
    def counts(self) -> dict[str, int]:
        return {"train": self.train_examples or 16 * self.batch_size, "val": self.val_examples or 2 * self.batch_size}

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.micro.data import GeneratedSequences, GeneratedTensors

        counts = self.counts
        held = f"task.batch_size={self.batch_size}, " + ", ".join(f"task.{k}_examples={n}" for k, n in counts.items())
        numbers = 1 if self.model == "ragged" else math.prod(self.example_shape)
        require_memory(held, 4 * numbers * sum(counts.values()))
        return (GeneratedSequences if self.model == "ragged" else GeneratedTensors)(self, seed=seed)

    def build_net(self) -> nn.Module:
        import torch

        from tasks.micro.model import NETWORKS

        layers = {} if self.layers is None else {"layers": self.layers}
        net: nn.Module = NETWORKS[self.model](self.width, **layers)
        # What cuDNN is fast with; a compiler would choose it by itself, and eager should not lose by that.
        return net if self.image_size is None else net.to(memory_format=torch.channels_last)

    def default_learning_rate(self) -> float:
        """Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        assert self.width is not None
        return min(3e-3, 0.5 / self.width)

    def declare(self) -> Declaration:
        """The whole network as one part, as hardly anything repeats; of ``ragged`` its blocks, and the tail apart."""
        return TrainedTask.declare(self) if self.model == "ragged" else Declaration(whole=("net",), parts=("net",))

    def ragged(self) -> Ragged:
        return (("inputs", 1, PAD, 0), ("targets", 1, IGNORED, 0))

    def count(self, batch: Any) -> BatchCounts:
        tokens = batch.targets.numel() if batch.targets.ndim == 2 else None
        return BatchCounts(samples=batch.targets.shape[0], tokens=tokens, useful_tokens=batch.useful_tokens)

    def max_positions(self) -> int | None:
        return self.positions

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        if self.model == "ragged":
            tokens = torch.zeros(rows, positions, dtype=torch.long)
            return tokens, tokens
        shape = self.example_shape
        if self.positions is None:
            return torch.zeros(rows, *shape), torch.zeros(rows, dtype=torch.long)
        return torch.zeros(rows, positions, shape[1]), torch.zeros(rows, positions, dtype=torch.long)

    def counted_net(self) -> nn.Module:
        """The graph breaker branches on values: it needs some."""
        return self.build_net() if self.model == "graph_breaker" else TrainedTask.counted_net(self)
