"""Candidates: the ways to compile a program's modules, each prepared without compiling, to be put on and taken off."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from strategies import STRATEGIES, Program, Strategy
from strategies.base import Region
from strategies.compose import compiler_settings
from strategies.inplace import uncompile


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One strategy of the MODULE stage, applied to a program and taken off again."""

    strategy: Strategy
    kinds: list[int]
    """Modules without children in each kind of region; regions of one kind share their compiled code."""
    regions: list[Region]
    calls: list[Any]
    """Compiled calls of the regions; what they have compiled stays with them while they are off."""
    notes: list[str]
    settings: dict[str, Any]

    def put_on(self, program: Program, settings: contextlib.ExitStack) -> None:
        """Let the program's modules run compiled in this way; compiler settings hold until ``settings`` is closed."""
        for region, call in zip(self.regions, self.calls, strict=True):
            program.module.get_submodule(region.path)._compiled_call_impl = call
        program.regions[:] = self.regions
        program.settings.update(self.settings)
        settings.enter_context(compiler_settings(self.settings))

    def take_off(self, program: Program) -> None:
        """Let them run eager again; nothing is lost."""
        uncompile(program)


def prepare(name: str, program: Program) -> Candidate:
    """The candidate ``name`` for ``program``, which is left as it was. Raises ValueError where it does not apply."""
    strategy = STRATEGIES[name]()
    view = dataclasses.replace(program, regions=[], notes=[], settings={}, report={})
    try:
        strategy.apply(view)
        regions = list(view.regions)
        modules = [program.module.get_submodule(region.path) for region in regions]
        calls = [module._compiled_call_impl for module in modules]
    finally:
        uncompile(view)
    return Candidate(
        strategy=strategy,
        kinds=_kinds(modules),
        regions=regions,
        calls=calls,
        notes=list(view.notes),
        settings=dict(view.settings),
    )


def _kinds(modules: list[nn.Module]) -> list[int]:
    kinds: dict[tuple[Any, ...], int] = {}
    for module in modules:
        leaves = sum(1 for child in module.modules() if next(child.children(), None) is None)
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        kinds[type(module), shapes] = leaves
    return list(kinds.values())
