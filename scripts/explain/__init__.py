"""Explain: where the compiler splits, repeats or leaves out a training step: the findings, in torch's own text.

Units are in the field names; what was not looked at is None and named in ``not_looked_at``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.telemetry import source
from trainer.telemetry.files import finite
from trainer.telemetry.source import Line

SCHEMA = 5
"""Raised when the name or the meaning of a field changes."""
BARE = {
    "generic_jump": "which branch the code takes depends on the value of a tensor: torch.where, or torch.cond",
    "step_unsupported": "a function that is called here breaks, so that the graph around the call ends too",
}
"""What the breaks are for which torch has one word and no explanation."""
MODES = re.compile(r"grad_mode|autocast|\.training\b|requires_grad|dispatch key")
SIZES = re.compile(r"(size|stride|rank) mismatch|\.(size|stride)\(\)|requires_grad| % ")
"""Guards by which copies of one class differ that share their code: widths, and the first one's input."""
EXPECTED = {"validating": (MODES,), "warming": (MODES, SIZES)}
"""Recompiles that every run has: graphs for validation, and the shapes that a strategy compiles beforehand."""
COMPILE_ID = re.compile(r"^\d+/\d+(_\d+)?: ", re.MULTILINE)


@dataclass(kw_only=True, slots=True)
class Finding:
    """One line at which the compiler ends a graph, or compiles again."""

    texts: list[str]
    """Torch's own, each once: the break with its hints, or the guards that failed."""
    where: Line | None
    """Of a break the line that the graph ends at, outside of torch and Lightning; of a recompile the line that reads
    what changed, or the function that was compiled again."""
    called_from: Line | None = None
    """The line of the user's own code that led there, where ``where`` is in a library."""
    inside: Line | None = None
    """The line of torch or Lightning that it leads to, where the graph ends there."""
    region: str | None = None
    phase: str = "training"
    count: int = 1
    """How often it was traced."""
    seconds: float | None = None
    """Spent on compiling again, forward; None for a break."""
    expected: bool = False
    """Whether every run has it: graphs of validation, of copies that have other sizes, and of shapes that a strategy
    compiles beforehand."""


@dataclass(kw_only=True, slots=True)
class Graphs:
    """Graphs of one kind of region; regions of one kind share them."""

    region: str
    """Class of the submodule, ``optimizer``, or ``outside regions``."""
    paths: list[str] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    """Backward graphs that were compiled; a backend without autograd has none."""
    validation: int = 0
    breaks: int = 0
    recompiles: int = 0


@dataclass(kw_only=True, slots=True)
class Explanation:
    """Everything about one task under one list of strategies."""

    task: str
    strategies: str
    backend: str
    command: list[str] = field(default_factory=list)
    device: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    batches: int = 0
    """Training batches of the epoch that were looked at."""
    batches_run: int = 0
    """Of those, run through forward, backward and optimizer step: the first ones, then one of each new kind."""
    batch_kinds: dict[str, int] = field(default_factory=dict)
    """Batches by the shapes of their tensors."""
    stopped: str | None = None
    """Why not the whole epoch was looked at; None when it was."""
    graphs: list[Graphs] = field(default_factory=list)
    breaks: list[Finding] = field(default_factory=list)
    recompiles: list[Finding] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What did not compile at all, or ended the steps."""
    notes: list[str] = field(default_factory=list)
    """Notes of the strategies."""
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
        return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"


def read_break(text: str, stack: Sequence[Line], *, region: str | None, phase: str) -> Finding:
    """The break that torch describes as ``text`` at the end of ``stack``, outermost line first."""
    text = text.strip() or "no reason given"
    more = BARE.get(text.split()[0])
    where, called_from, inside = source.of_interest(stack)
    return Finding(
        texts=[f"{text}: {more}" if more else text],
        where=where,
        called_from=called_from,
        inside=inside,
        region=region,
        phase=phase,
    )


def read_recompile(
    text: str,
    *,
    function: Line | None,
    region: str | None,
    phase: str,
    seconds: float | None = None,
    first_call: bool = False,
) -> Finding:
    """The recompile that torch explains as ``text``.

    ``function`` is the code that was compiled again, for a guard that names no line; ``first_call`` says that a region
    was called for the first time, which shares its code with others of its class.
    """
    where = source.of_interest(source.lines_of_stack(text))[0] or function
    if where is not None and source.is_machinery(where.file):
        where = None  # a module of torch's own: the region says which
    guard = text.partition("\n")[0]
    kinds = (*EXPECTED.get(phase, ()), *([SIZES] if first_call else []))
    return Finding(
        texts=[COMPILE_ID.sub("", text.strip())],
        where=where,
        region=region,
        phase=phase,
        seconds=seconds,
        expected=any(kind.search(guard) for kind in kinds),
    )


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each line and region, counted, with each of torch's texts about it: a break in an inlined
    function is met again in the function itself."""
    kept: dict[tuple[object, ...], Finding] = {}
    for each in findings:
        where = (each.where.file, each.where.number) if each.where else each.texts
        one = kept.setdefault((each.region, each.expected, *where), each)
        if one is not each:
            one.count += each.count
            one.called_from = one.called_from or each.called_from
            one.texts += [text for text in each.texts if text not in one.texts]
            one.seconds = None if one.seconds is None else one.seconds + (each.seconds or 0.0)
    return list(kept.values())
