"""A backend with an activation-memory budget of its own, so that every region can have a different one.

The budget tells AOTAutograd's partitioner which share of the activations the forward pass may keep for the backward;
the rest is computed again. Torch reads it from one process-wide setting while it compiles
(``torch._functorch.config.activation_memory_budget``, https://pytorch.org/blog/activation-checkpointing-techniques/),
which is why it is set around each compilation and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedBackend:
    """``backend`` of ``torch.compile`` that compiles under a budget.

    Equal by value: blocks share compiled code only where their backends compare equal.
    """

    backend: str
    """``inductor`` or the name of another backend that is built on AOTAutograd."""
    budget: float
    """Share of the activations to keep, 0 to 1; 1 is torch's default."""

    def __call__(
        self, graph: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile one graph; forward and backward are split here, even where the backward is lowered later."""
        import torch._functorch.config as functorch_config
        from torch._dynamo.backends.registry import lookup_backend

        compiler: Callable[..., Any] = lookup_backend(self.backend)
        # What torch.compile itself hands to Inductor as options is called config_patches there.
        patches = {"config_patches": options} if options else {}
        with functorch_config.patch(activation_memory_budget=self.budget):
            compiled: Callable[..., Any] = compiler(graph, example_inputs, **patches)
        return compiled
