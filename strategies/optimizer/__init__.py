"""``compile=optimizer``: the optimizer's step compiled chunk by chunk; no schedule recompiles it."""

from strategies.optimizer.strategy import Optimizer as Optimizer
