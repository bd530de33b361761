"""Micro: small networks on generated data, for what compiling gains or costs where little or nothing repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Declaration, TrainedTask, require_at_least, suggest
from tasks.resources import LEAST_OF_EXAMPLE, require_memory

if TYPE_CHECKING:
    import lightning
    from torch import nn


CLASSES = 10
"""Outputs of every micro model."""
POOLED = 8
"""Rows and columns that ``complex_mixed`` pools its features to."""


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


DEFAULTS: dict[str, MicroSize] = {
    "simple_linear": MicroSize(batch_size=32, width=512),
    "large_linear": MicroSize(batch_size=64, width=2048),
    "convnet": MicroSize(batch_size=32, width=64, image_size=224),
    "transformer_block": MicroSize(batch_size=32, width=512, positions=128),
    "complex_mixed": MicroSize(batch_size=32, width=64, image_size=32),
    "graph_breaker": MicroSize(batch_size=32, width=512),
    "ragged": MicroSize(batch_size=32, width=256, positions=512, layers=4),
}
"""Each model at its default size. The quoted benchmark gives the first three batches or images and no other number."""


def heads(width: int) -> int:
    """Attention heads of 64 features each, or a single one where the width does not divide so."""
    return width // 64 if width % 64 == 0 else 1


def multiply_adds(model: str, size: MicroSize, *, positions: int) -> tuple[int, int]:
    """Multiply-adds of one example's forward: (of layers that read the input, of all others).

    ``positions``: of this batch, 0 for a model without sequences. Matrix products and convolutions count, norms and
    pooling do not; causal attention counts in full, as ``torch.utils.flop_counter`` has it.
    """
    return _COUNTS[model](size, positions)


def _simple_linear(size: MicroSize, positions: int) -> tuple[int, int]:
    return size.width**2, size.width * CLASSES


def _large_linear(size: MicroSize, positions: int) -> tuple[int, int]:
    return size.width**2, 2 * size.width**2 + size.width * CLASSES


def _graph_breaker(size: MicroSize, positions: int) -> tuple[int, int]:
    return size.width**2, size.width**2 + size.width * CLASSES


def _convnet(size: MicroSize, positions: int) -> tuple[int, int]:
    assert size.image_size is not None
    first, second, third = (size.image_size // scale for scale in (1, 2, 4))
    wider = 9 * 2 * size.width**2 * second**2 + 9 * 8 * size.width**2 * third**2
    return 9 * 3 * size.width * first**2, wider + 4 * size.width * CLASSES


def _complex_mixed(size: MicroSize, positions: int) -> tuple[int, int]:
    assert size.image_size is not None
    pixels, width = (size.image_size // 2) ** 2, size.width
    attention = 4 * pixels * width**2 + 2 * pixels**2 * width
    linear = POOLED**2 * width * 8 * width + 8 * width * CLASSES
    return 9 * 3 * width * size.image_size**2, attention + linear


def _block(width: int, positions: int) -> tuple[int, int]:
    """Query, key and value; attention, its output and the MLP."""
    return 3 * positions * width**2, 9 * positions * width**2 + 2 * positions**2 * width


def _transformer_block(size: MicroSize, positions: int) -> tuple[int, int]:
    projections, others = _block(size.width, positions)
    return projections, others + positions * size.width * CLASSES


def _ragged(size: MicroSize, positions: int) -> tuple[int, int]:
    assert size.layers is not None
    return 0, size.layers * sum(_block(size.width, positions)) + positions * size.width * CLASSES


_COUNTS: dict[str, Callable[[MicroSize, int], tuple[int, int]]] = {
    "simple_linear": _simple_linear,
    "large_linear": _large_linear,
    "graph_breaker": _graph_breaker,
    "convnet": _convnet,
    "complex_mixed": _complex_mixed,
    "transformer_block": _transformer_block,
    "ragged": _ragged,
}


OPTIONAL = {"image_size": "image_size", "positions": "positions", "layers": "layers", "pad_to": "layers"}
"""Options that only models with some dimension have, and that dimension."""
BATCHES = {"train_examples": 16, "val_examples": 2}
"""Batches of examples where their number is left open."""


@dataclass(kw_only=True, slots=True)
class Micro(TrainedTask):
    """One small network, by name: classes of random inputs, learned from generated data."""

    name: ClassVar[str] = "micro"
    monitor: ClassVar[str | None] = "val/loss"

    model: str = "simple_linear"
    """``simple_linear``, ``large_linear``, ``convnet``, ``transformer_block``, ``complex_mixed``, ``graph_breaker`` or
    ``ragged``; see docs/tasks/micro.md."""
    batch_size: int | None = None
    """Examples in a batch on each device; None: the model's own, 64 for ``large_linear`` and 32 for the others."""
    width: int | None = None
    """Features of every layer; of ``convnet`` and ``complex_mixed`` channels of the first convolution. None: the
    model's own, 512 for ``simple_linear``, ``graph_breaker`` and ``transformer_block``, 2048 for ``large_linear``,
    256 for ``ragged``, 64 for images."""
    image_size: int | None = None
    """Rows and columns of an image, pixels. None: 224 for ``convnet``, 32 for ``complex_mixed``."""
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
        """Raise ValueError for values out of range and for options that the model does not have."""
        TrainedTask.__post_init__(self)
        if self.model not in DEFAULTS:
            raise ValueError(
                f"task.model={self.model!r} is not one of {tuple(DEFAULTS)}{suggest(self.model, DEFAULTS)}"
            )
        for name, dimension in OPTIONAL.items():
            if getattr(self, name) is not None and getattr(DEFAULTS[self.model], dimension) is None:
                having = ", ".join(model for model, size in DEFAULTS.items() if getattr(size, dimension) is not None)
                raise ValueError(f"task.{name}={getattr(self, name)}: task.model={self.model} has none ({having} do)")
        for name in ("batch_size", "width", "layers", "train_examples", "val_examples"):
            require_at_least(f"task.{name}", getattr(self, name), 1)
        require_at_least("task.image_size", self.image_size, 8)
        require_at_least("task.positions", self.positions, 4)
        if self.pad_to is not None and self.size.positions is not None:
            require_at_least("task.pad_to", self.pad_to, self.size.positions)
        if self.train_examples is not None and self.train_examples < self.size.batch_size:
            raise ValueError(
                f"task.train_examples={self.train_examples} must be at least task.batch_size={self.size.batch_size}"
            )

    @property
    def title(self) -> str:
        """``micro ragged``: seven models have little in common."""
        return f"{self.name} {self.model}"

    @property
    def size(self) -> MicroSize:
        """The model's dimensions: its own, but for those that are set."""
        default = DEFAULTS[self.model]
        given = {name: getattr(self, name) for name in MicroSize.__dataclass_fields__}
        return replace(default, **{name: value for name, value in given.items() if value is not None})

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module."""
        from tasks.base import Loading
        from tasks.micro.data import GeneratedSequences, GeneratedTensors
        from tasks.module import IGNORED

        size = self.size
        counts = {
            name: batches * size.batch_size if (given := getattr(self, name)) is None else given
            for name, batches in BATCHES.items()
        }
        # No worker processes: what is in memory already would only be copied between them.
        loading = Loading(batch_size=size.batch_size, num_workers=0)
        train_count, val_count = counts["train_examples"], counts["val_examples"]
        held = f"task.batch_size={size.batch_size}, task.train_examples={train_count}, task.val_examples={val_count}"
        if self.model == "ragged":
            assert size.positions is not None
            require_memory(held, LEAST_OF_EXAMPLE * (train_count + val_count))
            return GeneratedSequences(
                loading,
                longest=size.positions,
                pad_to=self.pad_to,
                classes=CLASSES,
                ignored=IGNORED,
                train_count=train_count,
                val_count=val_count,
                seed=seed,
            )
        shape: tuple[int, ...] = (size.width,)
        if size.image_size is not None:
            shape = (3, size.image_size, size.image_size)
        elif size.positions is not None:
            shape = (size.positions, size.width)
        # float32, and a key of each.
        require_memory(held, (4 * math.prod(shape) + LEAST_OF_EXAMPLE) * (train_count + val_count))
        return GeneratedTensors(
            loading, shape=shape, classes=CLASSES, train_count=train_count, val_count=val_count, seed=seed
        )

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module; see ``initialise`` for its weights."""
        from tasks.micro.model import MicroModule

        # Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466).
        recipe = self.recipe(default_learning_rate=min(3e-3, 0.5 / self.size.width), max_steps=max_steps)
        return MicroModule(self._build, recipe, initialise=self.initialise)

    def _build(self) -> nn.Module:
        import torch

        from tasks.micro.model import (
            ComplexMixed,
            ConvNet,
            GraphBreaker,
            LargeLinear,
            RaggedLabeller,
            SimpleLinear,
            SingleBlock,
        )

        size = self.size
        net: nn.Module
        if self.model == "transformer_block":
            net = SingleBlock(size.width, heads(size.width), CLASSES)
        elif self.model == "ragged":
            assert size.layers is not None
            net = RaggedLabeller(layers=size.layers, width=size.width, heads=heads(size.width), classes=CLASSES)
        else:
            plain = {
                "simple_linear": SimpleLinear,
                "large_linear": LargeLinear,
                "graph_breaker": GraphBreaker,
                "convnet": ConvNet,
                "complex_mixed": ComplexMixed,
            }
            net = plain[self.model](size.width, CLASSES)
        if size.image_size is not None:
            # What cuDNN is fast with; a compiler would choose it by itself, and eager should not lose by that.
            net = net.to(memory_format=torch.channels_last)
        return net

    def declare(self) -> Declaration:
        """The whole network as one part, as hardly anything repeats; of ``ragged`` its blocks, and the tail apart."""
        if self.model != "ragged":
            return Declaration(whole=("net",), parts=("net",))
        from tasks.micro.data import PAD
        from tasks.module import IGNORED

        return Declaration(
            whole=("net",),
            blocks=("net.blocks",),
            parts=("net.tail",),
            ragged=(("inputs", 1, PAD, 0), ("targets", 1, IGNORED, 0)),
        )

    def count(self, batch: Any) -> BatchCounts:
        """Count a GeneratedBatch: examples, and positions where there are any."""
        tokens = batch.targets.numel() if batch.targets.ndim == 2 else None
        return BatchCounts(samples=batch.targets.shape[0], tokens=tokens, useful_tokens=batch.useful_tokens)

    def training_flops(self, batch: Any) -> int:
        """Operations of matrix products and convolutions in forward and backward, 2 for each multiply-add.

        Backward costs twice forward, but once for layers that read the input, which needs no gradient.
        """
        first, others = self._multiply_adds(batch)
        return 2 * len(batch.targets) * (2 * first + 3 * others)

    def inference_flops(self, batch: Any) -> int:
        """Operations of matrix products and convolutions in forward, 2 for each multiply-add."""
        return 2 * len(batch.targets) * sum(self._multiply_adds(batch))

    def _multiply_adds(self, batch: Any) -> tuple[int, int]:
        positions = batch.targets.shape[1] if batch.targets.ndim == 2 else 0
        return multiply_adds(self.model, self.size, positions=positions)
