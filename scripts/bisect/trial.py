"""Trial: what is compiled for one try and what came of it, and what there is to try. JSON types; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from strategies.base import Stage, Strategy
from strategies.compose import label
from trainer.auto.estimates import refuse_choice

SYMPTOMS = ("fails", "breaks", "recompiles", "differs", "slower")
"""What a compile can do wrong, in the order in which a program is searched for it."""
OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""
LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.STEP: "left out, a captured step runs no single submodule",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One try: these submodules compiled each by itself, all others eager, on these batches one after the other."""

    symptom: str
    """One of ``SYMPTOMS``: what is looked for."""
    paths: tuple[str, ...]
    """Submodules, and ``OPTIMIZER`` for the optimizer step."""
    batches: tuple[int, ...] = (0,)
    """Numbers of the batches, in the order in which they are run after each other."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy that have another value for this try; ``options`` is replaced as a whole."""
    min_lost_seconds: float | None = None
    """A step that takes so much longer than eager's is slower; None = from the usual margin on."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    shows: bool
    """Whether the symptom was seen."""
    reason: str | None = None
    """What was seen, in one line; None where nothing was."""
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer step`` of a failure; None where that is not known."""
    where: str | None = None
    """``file:line in function`` that the compiler or the error names."""
    code: str | None = None
    """Text of that line."""
    batch: int | None = None
    """Number of the batch that showed it."""
    lost_seconds: float | None = None
    """Median seconds that a step takes longer than eager's; negative where it is faster. Timed trials only."""
    eager_seconds: float | None = None
    """Median seconds of a step of eager. Timed trials only."""
    crashed: bool = False
    """Whether the process was lost: a signal, or the time limit."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A submodule, and those below it."""

    path: str
    """As in ``module.get_submodule(path)``."""
    kind: str
    """Name of its class."""
    file: str | None = None
    """File of its class; None where there is none to read."""
    line: int | None = None
    """First line of the class."""
    likeness: str = ""
    """Equal for submodules that the compiler can be expected to treat alike: class, children, sizes of weights."""
    called: bool = True
    """Whether a step calls it: a list of modules is not called, nor is a layer whose weight alone is used."""
    children: list[Node] = field(default_factory=list)
    """Direct children in the module tree."""

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        return cls(**{**facts, "children": [Node.read(child) for child in facts["children"]]})


@dataclass(slots=True, kw_only=True)
class Site:
    """What there is to search: the regions of a program and the shapes of its batches."""

    regions: list[Node]
    """What the strategies hand to the compiler, each with what it holds."""
    strategy: str | None
    """Name of the strategy that does so; None where only the optimizer step is compiled."""
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of each region that a ``Part`` of ``modular`` would have to set, by path."""
    paths: list[str] = field(default_factory=list)
    """Every submodule of the model, for wildcards that match no other."""
    optimizer: bool = False
    """Whether a strategy compiles the optimizer step."""
    batches: list[str] = field(default_factory=list)
    """What each batch looks like: dtypes and shapes."""
    device: str = "cpu"
    """Type of the device."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of torch and others."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    @property
    def everything(self) -> tuple[str, ...]:
        return (*(node.path for node in self.regions), *([OPTIMIZER] if self.optimizer else []))

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        return cls(**{**facts, "regions": [Node.read(node) for node in facts["regions"]]})


class Tree:
    """The regions of a program and what they hold; the optimizer step is known as ``OPTIMIZER`` without being here."""

    def __init__(self, regions: Iterable[Node]) -> None:
        self.nodes = {node.path: node for region in regions for node in _all(region)}

    def likeness(self, path: str) -> str:
        """Equal for paths that the compiler can be expected to treat alike."""
        return self.nodes[path].likeness if path in self.nodes else path

    def children(self, path: str) -> list[str]:
        """The nearest submodules below ``path`` that a step calls."""
        return [] if path == OPTIMIZER else list(_called(self.nodes[path].children))

    def without(self, paths: Sequence[str], left_out: Collection[str], own_code: Collection[str] = ()) -> list[str]:
        """All of ``paths`` but ``left_out``: as they are where they hold none of it, else the largest submodules in
        them that do not. The code of those in between stays eager, and of ``own_code`` nothing but its own code."""
        kept: list[str] = []
        for path in paths:
            if any(holds(out, path) for out in left_out):
                continue
            if any(holds(path, out) for out in (*left_out, *own_code)):
                kept += self.without(self.children(path), left_out, own_code)
            else:
                kept.append(path)
        return kept


def holds(outer: str, path: str) -> bool:
    """Whether ``path`` is ``outer`` or lies in it."""
    return path == outer or path.startswith(f"{outer}.")


def searched(strategies: Iterable[Strategy]) -> tuple[list[Strategy], list[str]]:
    """The strategies that can be searched, and notes about the others. Raises ValueError when none compiles."""
    given = list(strategies)
    refuse_choice(given)
    kept = [each for each in given if each.stage not in LEFT_OUT]
    notes = [f"{each.name}: {LEFT_OUT[each.stage]}" for each in given if each.stage in LEFT_OUT]
    if not any(each.stage in (Stage.MODULE, Stage.OPTIMIZER) for each in kept):
        raise ValueError(f"compile={label(given)}: compiles nothing, there is nothing to search; try compile=whole")
    return kept, notes


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def _called(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        if node.called:
            yield node.path
        else:
            yield from _called(node.children)
