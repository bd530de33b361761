"""Explain: where the compiler splits, repeats or leaves out a training step: the findings, in torch's own text.

What was not looked at is None and named in ``not_looked_at``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.telemetry.record import Event
from trainer.telemetry.serialization import nan_to_none

SCHEMA = 8
"""Raised when the name or the meaning of a field changes."""
BATCHES = 20
"""Trained on unless more are asked for: most shapes come early, and code that compiles at each step takes its time."""
BARE = {
    "generic_jump": "which branch the code takes depends on the value of a tensor: torch.where, or torch.cond",
    "step_unsupported": "a function that is called here breaks, so that the graph around the call ends too",
}
"""What the breaks are for which torch has one word and no explanation."""
COMPILE_ID = re.compile(r"^\d+/\d+(_\d+)?: ", re.MULTILINE)


@dataclass(kw_only=True, slots=True)
class Finding:
    """One line at which the compiler ends a graph, or compiles again."""

    texts: list[str]
    """Torch's own, each once: the break with its hints, or the guards that failed."""
    where: str | None
    """As ``Event.location``."""
    count: int = 1
    """How often it was traced."""
    expected: bool = False
    """Whether every run has it: graphs of validation, of copies of other sizes, of shapes that buckets plan."""


@dataclass(kw_only=True, slots=True)
class Explanation:
    """Everything about one task under one list of strategies."""

    task: str
    strategies: str
    device: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    batches: int = 0
    """Training batches that went through forward, backward and optimizer step."""
    breaks: list[Finding] = field(default_factory=list)
    recompiles: list[Finding] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What did not compile at all, or ended the steps."""
    notes: list[str] = field(default_factory=list)
    """Notes of the strategies, and why graphs were left out of CUDA graphs."""
    not_looked_at: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[Finding]:
        """Recompiles that a change of the code would save."""
        return [recompile for recompile in self.recompiles if not recompile.expected]

    @property
    def problems(self) -> int:
        return len(self.breaks) + len(self.unexpected) + len(self.failures)

    def as_json(self) -> str:
        """One JSON document, indented, with a newline at its end."""
        facts = {"schema": SCHEMA, "problems": self.problems, **dataclasses.asdict(self)}
        return json.dumps(nan_to_none(facts), indent=2, allow_nan=False) + "\n"


def findings(events: Iterable[Event], kind: str, *, first_steps: int = 1) -> list[Finding]:
    """Events of one ``kind``, a line's together: a break in an inlined function is met again in the function itself.

    In the ``first_steps`` of a training every run compiles, one step for each shape that is planned.
    """
    kept: dict[tuple[str, bool], Finding] = {}
    for event in events:
        if event.kind != kind:
            continue
        text = COMPILE_ID.sub("", event.reason) or "no reason given"
        more = BARE.get(text.split()[0])
        text = f"{text}: {more}" if more else text
        expected = event.is_expected(first_steps=first_steps)
        place = (event.location or "").rpartition(" ")[0] or text
        one = kept.setdefault((place, expected), Finding(texts=[], where=event.location, count=0))
        one.count, one.expected = one.count + 1, expected
        one.texts += [text] if text not in one.texts else []
    return list(kept.values())
