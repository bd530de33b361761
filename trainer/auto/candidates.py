"""Candidates: the ways to compile a program's modules, each outlined before it is put on and taken off."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from strategies import STRATEGIES, Program, Strategy
from strategies.base import Region
from strategies.compose import compiler_settings
from strategies.regions import uncompile


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One strategy of the MODULE stage, applied to a program when it is put on, and taken off again."""

    strategy: Strategy
    kinds: list[int]
    """Modules without children in each kind of region; regions of one kind share their compiled code."""
    notes: list[str]
    _regions: list[Region] = field(default_factory=list, init=False)
    _calls: list[Any] = field(default_factory=list, init=False)
    """Compiled calls of the regions, there once it has been put on; what they have compiled stays with them while they
    are off."""
    _settings: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def needs_inductor(self) -> bool:
        """Whether Inductor compiles it."""
        return self.strategy.needs_inductor

    def put_on(self, program: Program, settings: contextlib.ExitStack) -> None:
        """Let the program's modules run compiled in this way; compiler settings hold until ``settings`` is closed."""
        if not self._calls:
            self._apply(program)
        for region, call in zip(self._regions, self._calls, strict=True):
            program.module.get_submodule(region.path)._compiled_call_impl = call
        program.regions[:] = self._regions
        program.settings.update(self._settings)
        settings.enter_context(compiler_settings(self._settings))

    def take_off(self, program: Program) -> None:
        """Let them run eager again; nothing is lost."""
        uncompile(program)

    def _apply(self, program: Program) -> None:
        view = _view(program, outlined=False)
        try:
            self.strategy.apply(view)
            self._regions = list(view.regions)
            self._calls = [program.module.get_submodule(region.path)._compiled_call_impl for region in view.regions]
        finally:
            uncompile(view)
        self._settings = dict(view.settings)


def prepare(name: str, program: Program) -> Candidate:
    """The candidate ``name`` for ``program``, which is left as it was; nothing is handed to the compiler yet.

    Raises ValueError where it does not apply.
    """
    strategy = STRATEGIES[name]()
    view = _view(program, outlined=True)
    strategy.apply(view)
    modules = [program.module.get_submodule(region.path) for region in view.regions]
    return Candidate(strategy=strategy, kinds=_kinds(modules), notes=list(view.notes))


def _view(program: Program, *, outlined: bool) -> Program:
    return dataclasses.replace(program, outlined=outlined, regions=[], notes=[], settings={}, report={})


def _kinds(modules: list[nn.Module]) -> list[int]:
    kinds: dict[tuple[Any, ...], int] = {}
    for module in modules:
        leaves = sum(1 for child in module.modules() if next(child.children(), None) is None)
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        kinds[type(module), shapes] = leaves
    return list(kinds.values())
