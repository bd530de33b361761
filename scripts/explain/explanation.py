"""Explanation: what ``scripts.explain`` found out about one training step, in types that JSON knows.

Units are in the field names; what was not looked at is None and named in ``not_looked_at``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from trainer.telemetry.files import finite
from trainer.telemetry.source import Line

SCHEMA = 2
"""Raised when the name or the meaning of a field changes. Up to 1, ``fix`` was ``mend``."""


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
    """``shape``, ``dtype``, ``training flag``, ``number``, ...; see ``trainer.telemetry.recompiles``."""
    what: str
    """What changed: an expression in the user's code, or a tensor."""
    guard: str
    """The guard in torch's words."""
    changes: list[str] = field(default_factory=list)
    """``before -> after``, one for each time."""
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
    operations: int = 0
    """Operations in the forward graphs."""
    breaks: int = 0
    recompiles: int = 0


@dataclass(kw_only=True, slots=True)
class Share:
    """Part of the measured step."""

    phase: str
    """``forward``, ``backward``, ``optimizer`` or ``host``."""
    what: str
    seconds: float
    """Mean of the steps, on the host."""
    share: float
    """Of the step's host time."""
    compiled: bool
    device_seconds: float | None = None
    """Of the kernels launched there; None without an accelerator."""


@dataclass(kw_only=True, slots=True)
class Coverage:
    """How much of the step compiled code is."""

    step_seconds: float
    """Mean host time of a step; that of each share is a mean too, so that they add up to it."""
    compiled_share: float
    """Share of the step's host time within compiled code, forward, backward and optimizer."""
    steps: int
    """Steps that were profiled."""
    shares: list[Share] = field(default_factory=list)
    """Largest first."""


@dataclass(kw_only=True, slots=True)
class Kernels:
    """What Inductor made of the graphs."""

    generated: int
    """Kernels written by Inductor."""
    nodes_before_fusion: int
    """Operations that went in, after lowering."""
    external_calls: int
    """Calls of libraries: matrix products, convolutions, attention."""
    cudagraph_skips: int | None = None
    """Graphs that were left out of CUDA graphs; None where none were asked for."""
    cudagraph_reasons: list[str] = field(default_factory=list)


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
    coverage: Coverage | None = None
    kernels: Kernels | None = None
    notes: list[str] = field(default_factory=list)
    """Notes of the strategies."""
    not_looked_at: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """What was written because it was asked for, by what it is."""

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
