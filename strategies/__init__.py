"""Compile strategies: each one is a dataclass in a file of its own; ``STRATEGIES`` names those that ship."""

from strategies.base import Program, Ragged, Region, Stage, Strategy
from strategies.regional import Regional
from strategies.whole import Whole

STRATEGIES: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in (Whole, Regional)}
"""Shipped strategies by the name they have under ``compile`` in the configuration."""

__all__ = ["STRATEGIES", "Program", "Ragged", "Region", "Regional", "Stage", "Strategy", "Whole"]
