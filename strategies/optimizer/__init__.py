"""``compile=optimizer``: the optimizer's step compiled chunk by chunk; no schedule recompiles it.

For optimizers that have no fused step of their own.
"""

from strategies.optimizer.strategy import Optimizer as Optimizer
