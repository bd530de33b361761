"""Draws: whether what is compiled draws random numbers, of which a compiler may draw others than eager.

What the training step draws outside of it (the noise that a generator begins with, the time steps of a diffusion) is
the same in eager and compiled, because both begin from the same state of the generators; it takes nothing from the
sharpness of a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from strategies import Program
from strategies.optimizer_step import installed
from strategies.optimizer_update import FunctionalUpdate
from trainer.snapshot import drew_random_numbers, random_state


@contextlib.contextmanager
def region_draws(program: Program) -> Iterator[list[str]]:
    """Inside, which has to be eager, the paths of the regions that drew in a forward are added to the list."""
    regions = {id(program.module.get_submodule(region.path)): region.path for region in program.regions}
    drawn: list[str] = []
    before: list[tuple[int, tuple[Any, ...]]] = []

    def enters(module: nn.Module, _: Any) -> None:
        if id(module) in regions and not drawn and not before:
            before.append((id(module), random_state()))

    def leaves(module: nn.Module, *_: Any) -> None:
        if before and before[0][0] == id(module) and drew_random_numbers(before.pop()[1]):
            drawn.append(regions[id(module)])

    # Not on the modules: what is compiled from them is guarded against hooks that come and go.
    handles = [
        nn.modules.module.register_module_forward_pre_hook(enters),
        nn.modules.module.register_module_forward_hook(leaves),
    ]
    try:
        yield drawn
    finally:
        for handle in handles:
            handle.remove()


def may_draw_in_step(program: Program) -> bool:
    """Whether the step of an optimizer is compiled of which nobody knows what it does."""
    updates = [installed(optimizer) for optimizer in program.optimizers]
    return any(update is not None and not isinstance(update, FunctionalUpdate) for update in updates)
