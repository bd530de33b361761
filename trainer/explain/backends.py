"""Backends: the same strategies with a quicker compiler, which sees the same breaks and recompiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from strategies import Modular, Strategy
from strategies.options import KNOBS
from trainer.auto.estimates import refuse_choice

BACKENDS = ("configured", "inductor", "aot_eager", "eager")
"""Choices of ``--backend``; ``configured`` leaves each strategy its own."""


def prepared(strategies: Iterable[Strategy], backend: str) -> list[Strategy]:
    """Copies of ``strategies`` that compile with ``backend``, let graphs break and store nothing.

    Raises ValueError where it is still to be chosen what they are.
    """
    strategies = list(strategies)
    refuse_choice(strategies)
    return [_copy(strategy, backend) for strategy in strategies if strategy.name != "cached"]


def strict(strategies: Iterable[Strategy]) -> list[str]:
    """Names of the strategies that a graph break would end the run under."""
    return [
        strategy.name
        for strategy in strategies
        if strategy.name != "optimizer" and getattr(strategy, "fullgraph", False)
    ]


def backends_of(strategies: Iterable[Strategy]) -> list[str]:
    """The backends that ``strategies`` compile with, each once."""
    names: list[str] = []
    for strategy in strategies:
        parts = strategy.parts.values() if isinstance(strategy, Modular) else [strategy]
        names += [part.backend for part in parts if hasattr(part, "backend")]
    return list(dict.fromkeys(names))


def _copy(strategy: Strategy, backend: str) -> Strategy:
    changes: dict[str, Any] = {}
    if isinstance(strategy, Modular):
        changes["parts"] = {
            name: dataclasses.replace(part, **_changes(part, backend)) for name, part in strategy.parts.items()
        }
    else:
        changes = _changes(strategy, backend)
        if strategy.name == "optimizer":  # an update has no graph breaks to allow
            changes.pop("fullgraph", None)
    return dataclasses.replace(strategy, **changes)


def _changes(options: Any, backend: str) -> dict[str, Any]:
    names = {option.name for option in dataclasses.fields(options)}
    changes: dict[str, Any] = {"fullgraph": False} if "fullgraph" in names else {}
    if backend == "configured" or "backend" not in names or options.backend == backend:
        return changes
    changes["backend"] = backend
    if backend != "inductor":  # mode and options are Inductor's
        reset: dict[str, Any] = {"mode": "default", "options": {}, **dict.fromkeys(KNOBS)}
        if backend == "eager":
            reset["activation_memory_budget"] = None
        changes |= {name: value for name, value in reset.items() if name in names}
    return changes
