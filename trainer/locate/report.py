"""Report: what a search found, in types that JSON knows. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from trainer.telemetry.files import finite

SCHEMA = 1
"""Raised when the meaning of a field changes."""
NOTHING_WRONG, FOUND, REFUSED, ONLY_TOGETHER = 0, 1, 2, 3
"""Exit codes."""


@dataclass(slots=True, kw_only=True)
class Blamed:
    """The smallest submodule, or the optimizer step, that shows the symptom when nothing else is compiled."""

    path: str
    kind: str | None = None
    """Name of its class; None for the optimizer step."""
    file: str | None = None
    line: int | None = None
    """Where its class begins."""
    reason: str | None = None
    """What was seen of it alone."""
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer step``; None where that is not known, or is no failure."""
    where: str | None = None
    """``file:line in function`` of the error or break itself."""
    code: str | None = None
    copies: list[str] = field(default_factory=list)
    """Others like it that show it too, compiled together."""
    own_code: bool = False
    """Whether its children show nothing: it is its own code, or how they come together in one graph."""


@dataclass(slots=True, kw_only=True)
class OptionTried:
    """One option of the strategy with another value, everything compiled."""

    said: str
    shows: bool
    reason: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """The options' values."""
    backend: bool = False
    """Whether it is another compiler: tells whose fault it is."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    task: str
    strategies: str
    command: list[str]
    """Overrides as they were given."""
    symptom: str | None = None
    """``fails``, ``breaks``, ``recompiles``, ``differs`` or ``slower``; None where nothing is wrong."""
    searched_for: list[str] = field(default_factory=list)
    """Symptoms that the whole was tried for."""
    compiled: list[str] = field(default_factory=list)
    """What the strategies compile: paths of submodules, the optimizer step."""
    reason: str | None = None
    """What was seen with everything compiled."""
    phase: str | None = None
    where: str | None = None
    code: str | None = None
    lost_seconds: float | None = None
    """Median seconds that a step with everything compiled takes longer than eager's; None where none was timed."""
    eager_seconds: float | None = None
    lost_seconds_by_part: dict[str, float] = field(default_factory=dict)
    """The same with one part compiled alone, for each that was timed alone; negative where it is faster."""
    shapes: list[str] = field(default_factory=list)
    """Shapes of the batches that were tried."""
    shapes_that_show: list[str] | None = None
    """Those that show it alone; None where only one shape was tried, empty where it takes several after each other."""
    shape_sequence: list[str] | None = None
    """Shapes that show it in this order; None where one is enough."""
    culprits: list[Blamed] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """Submodules that show it only when all of them are compiled."""
    together_reason: str | None = None
    options: list[OptionTried] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    """Largest submodules that hold no culprit."""
    rest_is_clean: bool | None = None
    """Whether compiling the rest shows nothing; None where there is no rest."""
    rest_reason: str | None = None
    suggestions: list[str] = field(default_factory=list)
    """Commands that go on without the symptom."""
    reproducer: str | None = None
    reproducer_shows: bool | None = None
    """Whether running it showed the same; None where it was not run."""
    trials: int = 0
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        """What a script ends with."""
        if self.symptom is None:
            return NOTHING_WRONG
        return FOUND if self.culprits or not self.together else ONLY_TOGETHER

    def as_json(self) -> str:
        """Everything, and the exit code."""
        facts: dict[str, Any] = {**dataclasses.asdict(self), "exit_code": self.exit_code}
        return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"
