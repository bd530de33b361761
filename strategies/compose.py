"""Put strategies in order and apply them: order comes from their stages, conflicts are errors that name both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from strategies.base import Program, Strategy


def ordered(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Strategies by stage, then name. Raises ValueError when two of them claim one exclusive stage."""
    result = sorted(strategies, key=lambda strategy: (strategy.stage, strategy.name))
    for first, second in itertools.pairwise(result):
        if first.stage == second.stage and (first.exclusive or second.exclusive):
            raise ValueError(
                f"compile: {first.name!r} and {second.name!r} both act on the {first.stage.name.lower()} stage; "
                "choose one of them"
            )
    return result


def label(strategies: Iterable[Strategy]) -> str:
    """Name of a combination in paths and tables: the strategies in order joined by ``+``, or ``eager``."""
    return "+".join(strategy.name for strategy in ordered(strategies)) or "eager"


def check(strategies: Sequence[Strategy]) -> None:
    """Let every strategy look at this machine and this torch before any work. Raises ValueError."""
    for strategy in strategies:
        strategy.check()


@contextlib.contextmanager
def compiler_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Set ``torch._dynamo.config`` values for the length of a run and restore them after it."""
    import torch._dynamo.config as config

    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def apply(strategies: Iterable[Strategy], program: Program) -> None:
    """Apply ``strategies`` to ``program`` in the order of their stages."""
    for strategy in ordered(strategies):
        strategy.apply(program)
