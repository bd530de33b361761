"""Search: what was looked at, from regions into what they are made of, and what of it is at fault. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scripts.arguments import reject_auto
from strategies.base import Stage, Strategy, label

MAX_SHAPES = 4
"""Shapes of batch that are looked at, the first ones."""
LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.OPTIMIZER: "left out, it is no submodule; a run compares its first step with torch's own",
    Stage.STEP: "left out, a captured step runs no single submodule",
}


@dataclass(slots=True, kw_only=True)
class ComparedModule:
    """One submodule, compiled and compared with eager at its first call in a step."""

    path: str
    about: str = ""
    """Its class, and ``file:line`` at which that begins where there is a source to read."""
    wrong: str | None = None
    """What is at fault, in one line: the largest differences, or what the compiler raised; None where nothing is."""
    skipped: str | None = None
    """Why it could not be compared."""
    children: list[ComparedModule] = field(default_factory=list)
    """What it called, looked at where it is at fault itself or could not be compared."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    looks: list[ComparedModule]
    """Those at the regions, on the batch that showed a fault, or on the last one."""
    batch: str
    """Dtypes and shapes of that batch."""
    batches: int
    """How many were looked at."""
    never_called: list[str] = field(default_factory=list)
    """Regions that the steps did not call."""
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those of ``torch.compile``, by the paths of the regions."""

    @property
    def culprits(self) -> list[ComparedModule]:
        """The smallest submodules at fault: nothing in them is."""
        return list(_smallest(self.looks))

    @property
    def not_compared(self) -> list[ComparedModule]:
        """Submodules of which, and of whose parts, nothing was compared."""
        return [look for look in all_of(self.looks) if look.skipped is not None and not look.children]

    @property
    def equal_modules(self) -> list[str]:
        """The largest submodules that equal eager."""
        return list(_equal(self.looks))


def _smallest(looks: Iterable[ComparedModule]) -> Iterator[ComparedModule]:
    for look in looks:
        inner = list(_smallest(look.children))
        yield from inner or ([look] if look.wrong is not None else [])


def _equal(looks: Iterable[ComparedModule]) -> Iterator[str]:
    for look in looks:
        if look.wrong is None and look.skipped is None:
            yield look.path
        else:
            yield from _equal(look.children)


def all_of(looks: Iterable[ComparedModule]) -> Iterator[ComparedModule]:
    """``looks`` and those below them."""
    for look in looks:
        yield look
        yield from all_of(look.children)


def searched(strategies: Iterable[Strategy]) -> tuple[list[Strategy], list[str]]:
    """The strategies that can be searched, and notes about the others. Raises ValueError when none compiles."""
    given = list(strategies)
    reject_auto(given)
    kept = [each for each in given if each.stage not in LEFT_OUT]
    notes = [f"{each.name}: {LEFT_OUT[each.stage]}" for each in given if each.stage in LEFT_OUT]
    if not any(each.stage is Stage.MODULE for each in kept):
        raise ValueError(
            f"compile={label(given)}: compiles no submodule, there is nothing to search; try compile=whole"
        )
    return kept, notes
