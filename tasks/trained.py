"""TrainedTask: base of the tasks that train by the shared recipe, with its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.base import Task
from tasks.checks import require_at_least, require_share

if TYPE_CHECKING:
    import lightning

    from tasks.models.recipe import Recipe

INITIALISE = ("auto", "host", "device")


@dataclass(kw_only=True, slots=True)
class TrainedTask(Task):
    """A task trained from random weights with AdamW under a linear warm-up and a cosine."""

    learning_rate: float | None = None
    """Highest learning rate of AdamW, reached after the warm-up. None: the task's own rule."""
    weight_decay: float = 0.05
    """AdamW's decoupled decay of weights; biases and norms have none."""
    warmup_steps: int = 50
    """Optimizer steps of linear warm-up."""
    final_learning_rate: float = 0.05
    """Learning rate at the last step, as a share of ``learning_rate``."""
    initialise: str = "auto"
    """Where initial weights are drawn: on the ``host``, or on the ``device`` (milliseconds for the host's seconds, but
    other numbers from the same seed on another kind of device). ``auto``: on the device where there is a CUDA device or
    the network has 1e9 parameters; else, and where a network cannot be built without memory, on the host."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        require_at_least("task.weight_decay", self.weight_decay, 0)
        if math.isinf(self.weight_decay):
            raise ValueError(f"task.weight_decay={self.weight_decay} must be finite")
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_share("task.final_learning_rate", self.final_learning_rate)
        if self.initialise not in INITIALISE:
            raise ValueError(f"task.initialise={self.initialise!r} is not one of {INITIALISE}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"task.learning_rate={self.learning_rate} must be above 0 and finite")

    def recipe(self, *, default_learning_rate: float, max_steps: int) -> Recipe:
        """The optimizer and its schedule over ``max_steps`` optimizer steps."""
        from tasks.models.recipe import Recipe

        return Recipe(
            learning_rate=default_learning_rate if self.learning_rate is None else self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            final_share=self.final_learning_rate,
            max_steps=max_steps,
        )

    def skipped_items(self, data: lightning.LightningDataModule) -> dict[str, int]:
        """Items left out so far, by reason."""
        skipped: dict[str, int] = getattr(data, "skipped", {})
        return skipped
