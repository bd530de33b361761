"""Scope: which strategies a search takes apart, and which it leaves out. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from strategies.base import Stage, Strategy
from strategies.compose import label
from trainer.auto.estimates import refuse_choice

LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.STEP: "left out, a captured step runs no single submodule",
}


def searched(strategies: Iterable[Strategy]) -> tuple[list[Strategy], list[str]]:
    """The strategies that can be searched, and what to say of the others. Raises ValueError when none compiles."""
    given = list(strategies)
    refuse_choice(given)
    kept = [each for each in given if each.stage not in LEFT_OUT]
    notes = [f"{each.name}: {LEFT_OUT[each.stage]}" for each in given if each.stage in LEFT_OUT]
    if not any(each.stage in (Stage.MODULE, Stage.OPTIMIZER) for each in kept):
        raise ValueError(f"compile={label(given)}: compiles nothing, there is nothing to search; try compile=whole")
    return kept, notes
