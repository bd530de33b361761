"""Explain: where the compiler splits, repeats or leaves out a training step: the findings, read from torch's own text.

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
from trainer.telemetry.source import FIXES, TENSOR_KINDS, Line, change_of, guard_of

SCHEMA = 4
"""Raised when the name or the meaning of a field changes."""
PAGE = re.compile(r"https?://\S+/gb/(?P<identifier>gb\d{4})\.html")
"""Torch's page about a kind of graph break."""
WITHOUT_WORDS = {
    "generic_jump": (
        "Data-dependent branching",
        "Which branch the code takes depends on the value of a tensor, known only when it runs.",
        "torch.where(condition, a, b) where both sides are cheap, torch.cond for one of two functions, or decide "
        "before the compiled module and hand in a Python value",
    ),
    "step_unsupported": (
        "Call of code that breaks",
        "A function that is called here holds a graph break of its own, so that the graph around the call ends too.",
        "goes away with the break in the function that is called here",
    ),
}
"""Kind, explanation and fix of the breaks for which torch has one word and no explanation."""
NO_HINT = "torch has no hint; torch.compiler.disable on the smallest function around the line keeps the rest in graphs"
ABOUT_TENSORS = {*TENSOR_KINDS.values(), "dtype", "rank", "device", "gradient mode"}
MODES = ("gradient mode", "training flag", "requires gradient", "dispatch")
SIZES = ("shape", "strides", "rank", "size relation")
DIFFER = (*SIZES, "requires gradient")
"""Kinds by which copies of one class differ that share their code: widths, and the first one's input."""
EXPECTED = {"validating": MODES, "warming": (*MODES, *SIZES)}
"""Kinds of recompiles that every run has: graphs for validation, and the shapes that a strategy compiles beforehand."""


@dataclass(kw_only=True, slots=True)
class Break:
    """One place where the compiler ends a graph and continues in Python."""

    kind: str
    """Torch's name for this kind of break."""
    identifier: str | None
    """Torch's number of the kind (``GB0124``); None where it gives none."""
    reason: str
    """Torch's explanation."""
    fix: str
    """Torch's own hints, and a link to its page about the kind."""
    where: Line | None
    """The line that the graph ends at, outside of torch and Lightning."""
    called_from: Line | None = None
    """The line of the user's own code that led there, where ``where`` is in a library."""
    inside: Line | None = None
    """The line of torch or Lightning that it leads to, where the graph ends there."""
    region: str | None = None
    phase: str = "training"
    count: int = 1
    """How often it was traced."""


@dataclass(kw_only=True, slots=True)
class Recompile:
    """One guard that failed, so that code which had been compiled was compiled again."""

    kind: str
    """``shape``, ``dtype``, ``training flag``, ``number``, ...; see ``trainer.telemetry.source``."""
    what: str
    """What changed: an expression in the user's code, or a tensor."""
    guard: str
    """The guard in torch's words."""
    changes: list[str] = field(default_factory=list)
    """``before -> after``, one for each time; after is ``?`` where torch does not say."""
    fix: str = ""
    where: Line | None = None
    """The line that reads what changed, or the function that was compiled again."""
    region: str | None = None
    phase: str = "training"
    count: int = 1
    expected: bool = False
    """Whether every run has it: graphs of validation, of copies that have other sizes, and of shapes that a strategy
    compiles beforehand."""
    resumed: bool = False
    """Whether what was compiled again is the rest of a function behind a break."""


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
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What did not compile at all, or ended the steps."""
    notes: list[str] = field(default_factory=list)
    """Notes of the strategies."""
    not_looked_at: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[Recompile]:
        """Recompiles that a fix would save."""
        return [recompile for recompile in self.recompiles if not recompile.expected]

    @property
    def problems(self) -> int:
        return len(self.breaks) + len(self.unexpected) + len(self.failures)

    def as_json(self) -> str:
        """One JSON document, indented, with a newline at its end."""
        facts = {"schema": SCHEMA, "problems": self.problems, **dataclasses.asdict(self)}
        return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"


def read_break(text: str, stack: Sequence[Line], *, region: str | None, phase: str) -> Break:
    """The break that torch describes as ``text`` at the end of ``stack``, outermost line first."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    head = lines[0] if lines else "no reason given"
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    explained = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    page = PAGE.search(text)
    kind, reason, fix = WITHOUT_WORDS.get(head.split()[0], (head, head, NO_HINT))
    fix = " ".join(hint for hint in hints if "report an issue" not in hint.lower()) or fix
    where, called_from, inside = source.of_interest(stack)
    return Break(
        kind=kind,
        identifier=page["identifier"].upper() if page else None,
        reason=explained[0] if explained else reason,
        fix=fix + (f" {page[0]}" if page else ""),
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
    first_call: bool = False,
    resumed: bool = False,
) -> Recompile:
    """The recompile that torch explains as ``text``.

    ``function`` is the code that was compiled again, for a guard that names no line; ``resumed`` says that it is the
    rest of one behind a break, ``first_call`` that a region was called for the first time, which shares its code with
    others of its class.
    """
    where = source.of_interest(source.lines_of_stack(text))[0] or function
    if where is not None and source.is_machinery(where.file):
        where = None  # a module of torch's own: the region says which
    kind, what, change = change_of(text)
    return Recompile(
        kind=kind,
        what=what,
        guard=guard_of(text),
        changes=[change] if change else [],
        fix=FIXES[kind],
        where=where,
        region=region,
        phase=phase,
        expected=kind in EXPECTED.get(phase, ()) or (first_call and kind in DIFFER),
        resumed=resumed,
    )


def merged_breaks(breaks: Sequence[Break]) -> list[Break]:
    """One break for each line and kind, counted: a break in an inlined function is met again in the function itself."""
    kept: dict[tuple[object, ...], Break] = {}
    for each in breaks:
        where = each.where
        one = kept.setdefault((where.file, where.number, each.kind) if where else (each.region, each.kind), each)
        if one is not each:
            one.count += each.count
            one.called_from = one.called_from or each.called_from
    return list(kept.values())


def merged_recompiles(recompiles: Sequence[Recompile]) -> list[Recompile]:
    """One recompile for each line and thing that changed, counted, with each of its changes."""
    kept: dict[tuple[object, ...], Recompile] = {}
    causes: dict[tuple[object, ...], Recompile] = {}
    for each in recompiles:
        cause = (each.kind, each.region, each.expected, *each.changes)
        where = (each.where.file, each.where.number) if each.where else None
        # What changes at the beginning of a function is met again in each of its pieces behind a break.
        again = causes.get(cause) if each.resumed and each.kind in ABOUT_TENSORS else None
        one = again or kept.setdefault((where, each.kind, each.what, each.region, each.expected), each)
        causes.setdefault(cause, one)
        if one is not each:
            one.count += each.count
            one.changes += [change for change in each.changes if change not in one.changes]
    return list(kept.values())
