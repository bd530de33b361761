"""Compile strategies: each one is a dataclass; ``STRATEGIES`` names those that ship."""

from strategies.base import Program, Ragged, Stage, Strategy
from strategies.buckets import Buckets
from strategies.cached import Cached
from strategies.cuda_graph import CudaGraph
from strategies.modular import Modular, Part
from strategies.modules import Auto, Background, Checkpointing, Dynamic, Regional, Whole
from strategies.optimizer import Optimizer
from strategies.second_order import SecondOrder

_SHIPPED = (
    *(Auto, Whole, Regional, Modular, SecondOrder, CudaGraph, Cached, Buckets, Dynamic, Optimizer, Checkpointing),
    Background,
)
STRATEGIES: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in _SHIPPED}
"""Shipped strategies by the name they have under ``compile`` in the configuration."""

__all__ = [
    "STRATEGIES",
    "Auto",
    "Background",
    "Buckets",
    "Cached",
    "Checkpointing",
    "CudaGraph",
    "Dynamic",
    "Modular",
    "Optimizer",
    "Part",
    "Program",
    "Ragged",
    "Regional",
    "SecondOrder",
    "Stage",
    "Strategy",
    "Whole",
]
