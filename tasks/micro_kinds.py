"""The micro models' numbers: default sizes and operations of each, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
