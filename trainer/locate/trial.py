"""Trial and outcome: what is compiled for one try, and what came of it, in types that JSON knows. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

SYMPTOMS = ("fails", "breaks", "recompiles", "differs", "slower")
"""What a compile can do wrong, in the order in which a program is searched for it."""
OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""


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
    least_lost_seconds: float | None = None
    """A step that takes so much longer than eager's is slower; None = from the usual margin on."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a trial."""

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

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        """From what ``dataclasses.asdict`` has made of one."""
        return cls(**facts)


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
        """From what ``dataclasses.asdict`` has made of one."""
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
    counts: list[int] = field(default_factory=list)
    """How many of the batches looked at are like it."""
    device: str = "cpu"
    """Type of the device."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of torch and others."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    @property
    def everything(self) -> tuple[str, ...]:
        """All that the strategies compile."""
        return (*(node.path for node in self.regions), *([OPTIMIZER] if self.optimizer else []))

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        """From what ``dataclasses.asdict`` has made of one."""
        return cls(**{**facts, "regions": [Node.read(node) for node in facts["regions"]]})


def plain(value: Any) -> dict[str, Any]:
    """A dataclass of this module as JSON takes it."""
    return dataclasses.asdict(value)
