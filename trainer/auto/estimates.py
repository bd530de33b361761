"""Estimates: what a candidate would cost and give before it has been tried, and its total time; no torch in here.

The constants are what was measured on the workloads of docs/results, rounded; they decide only whether a candidate is
worth a trial, never which one wins. What has been measured takes their place, also the ratio between this machine's
compile times and the rule's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from strategies import Strategy
from strategies.auto import Auto

EAGER = "eager"
FUSED = {"cuda": 1.40, "cpu": 1.15}
"""How many times faster than eager's the device's work of a compiled step is: 1.35 to 1.55 over six models (H200)."""
WHOLE_OVER_REGIONAL = 1.02
"""The same of one graph over regions: 1.00 to 1.03."""
WEAK = 0.85
"""Below this share of ``FUSED`` regions have left something out, which one graph may have."""
HOST = {EAGER: 1.0, "regional": 0.95, "whole": 0.70}
"""The host's part of a step as a share of eager's: regions call Python in between, one graph does not."""
WAITS = 1.1
"""A step that takes longer than this many times the device's work is bound by the host's launches."""
GAPS = 1.02
"""A step that takes no longer than this has no gaps between kernels that a graph would close."""
GRAPH_SECONDS, LEAF_SECONDS = 2.5, 0.11
"""A cold compile takes about this for each graph and for each module without children in it, those that share their
code once: 6 s for GPT-2's block and head, 31 s for the nine kinds of blocks in a ResNet-50, 32 s for a ViT and a
decoder of 12 blocks each as one graph (measured: 5 to 6, 34 and 35 to 41 s)."""
IMPORT_SECONDS = 2.5
"""Importing Inductor and starting its workers, once a process (measured on an H200 host, 2026-11-21)."""
VALIDATION = 0.35
"""Share by which validation's own graphs lengthen the compile; they are forwards only."""
WARM = 0.35
"""Share of a cold compile that is left where the compiler's caches have it."""
CAPTURE_SECONDS = 0.5
"""Capturing a step, comparing its first replay, and the steps that run before it: 0.05 to 0.5 s more than the first
steps of eager take (five workloads, H200)."""

CAPTURE_SHARE = 0.01
"""Of a run, that capturing a step on trial may take where it will hardly gain more than some percent."""


@dataclass(slots=True, kw_only=True)
class Estimates:
    """Everything known or expected about the candidates of one run.

    Args:
        steps: Optimizer steps that are planned.
        device: ``cuda`` or ``cpu``.
        modules: The ways to compile modules, ``eager`` among them.
        capture: ``no``, ``maybe`` or ``always``: whether whole steps may or will be captured.
        warm: Whether the compiler's caches hold what an earlier run of this program compiled.
        validates: Whether validation's graphs have to be compiled too.
        import_seconds: Until Inductor is imported, which the first candidate that compiles has to pay for.
    """

    steps: int
    device: str
    modules: dict[str, Module] = field(default_factory=dict)
    capture: str = "no"
    warm: bool = False
    validates: bool = False
    import_seconds: float = 0.0
    host_factor: float = 1.0
    """Compile seconds on this machine over those of the rule."""

    @property
    def _fused(self) -> float:
        return FUSED.get(self.device, FUSED["cpu"])

    def learn_host(self, module: Module) -> None:
        """Take what ``module``'s compile took as the measure of this machine."""
        if module.cold_seconds is not None and module.graphs:
            self.host_factor = module.cold_seconds / self._rule(module)

    def rows(self) -> list[Row]:
        """All candidates, the one with the least total time first; those that cannot be had last."""
        captures = {"no": (False,), "maybe": (False, True), "always": (True,)}[self.capture]
        rows = [self._row(module, captured) for module in self.modules.values() for captured in captures]
        return sorted(rows, key=lambda row: float("inf") if row.total_seconds is None else row.total_seconds)

    def unsure_of_capture(self, module: Module) -> bool:
        """Whether what a captured step takes is worth measuring with a graph, after ``module`` was timed.

        Of a compiled one, where only a bound is known: that would be taken for what its compile gave. And in a long run
        where the device seems never to wait: the gaps between kernels that are launched in time are too short to be
        seen, and a graph closes them as well (3% of a ResNet-50).
        """
        if self.capture == "no" or module.step_seconds is None:
            return False
        long = CAPTURE_SHARE * self.steps * module.step_seconds > CAPTURE_SECONDS
        return (module.at_most and module.name != EAGER) or (long and module.device_seconds == module.step_seconds)

    def unsure_of_eager(self, module: Module) -> bool:
        """Whether the same is worth measuring of eager's, after the compiled ``module``: eager's bound is enough where
        that gains as much as is to be expected, and where nothing is compiled."""
        eager = self.modules[EAGER]
        if module.name == EAGER or not eager.at_most or eager.device_seconds is None:
            return False
        works = module.device_seconds if module.cannot_capture is None else None
        return works is None or self._fused * works > eager.device_seconds

    def expected_compile_seconds(self, module: Module) -> float:
        """What compiling it costs from here, validation's graphs and Inductor's import included."""
        if not module.graphs:
            return 0.0
        training = self._training_compile_seconds(module)
        validation = VALIDATION * training if self.validates else 0.0
        return validation if module.spent else self.import_seconds + training + validation

    def _training_compile_seconds(self, module: Module) -> float:
        cold, warm = module.cold_seconds, module.warm_seconds
        if cold is None:
            cold = self._rule(module) * self.host_factor if warm is None else warm / WARM
        return (WARM * cold if warm is None else warm) if self.warm else cold

    def _rule(self, module: Module) -> float:
        return GRAPH_SECONDS * module.graphs + LEAF_SECONDS * module.leaves

    def _row(self, module: Module, captured: bool) -> Row:
        why = module.failed or (module.cannot_capture if captured and self.capture == "maybe" else None)
        if why:
            return Row(module=module.name, captured=captured, measured=False, why=why)
        # Where all steps are to be captured, those that cannot be run as they are.
        replayed = captured and module.cannot_capture is None
        step = self._device_seconds(module) if replayed else self._step_seconds(module)
        cost = self.expected_compile_seconds(module) + (CAPTURE_SECONDS if replayed else 0.0)
        measured = (module.device_seconds if replayed else module.step_seconds) is not None
        total = None if step is None else cost + self.steps * step
        return Row(
            module=module.name,
            captured=captured,
            measured=measured,
            step_seconds=step,
            cost_seconds=cost,
            total_seconds=total,
            at_most=replayed and module.at_most,
        )

    def _step_seconds(self, module: Module) -> float | None:
        if module.step_seconds is not None:
            return module.step_seconds
        eager = self.modules[EAGER]
        if eager.step_seconds is None:  # it does not fit: whatever does is better
            return None
        device = self._device_seconds(module)
        if device is None or eager.device_seconds is None:
            return eager.step_seconds / self._gain(module.name)
        # Where the device waits for the host, launching is what a step takes.
        launching = eager.step_seconds * HOST[module.name] if eager.step_seconds > WAITS * eager.device_seconds else 0.0
        return max(device, launching)

    def _device_seconds(self, module: Module) -> float | None:
        if module.device_seconds is not None:
            return module.device_seconds
        eager = self.modules[EAGER].device_seconds
        return None if eager is None else eager / self._gain(module.name)

    def _gain(self, name: str) -> float:
        """How many times faster than eager's the device's work is expected to be."""
        if name == EAGER:
            return 1.0
        expected = self._fused
        regional, eager = self.modules.get("regional"), self.modules[EAGER]
        if name != "whole" or regional is None:
            return expected
        seen = _ratio(eager.device_seconds, regional.device_seconds) or _ratio(
            eager.step_seconds, regional.step_seconds
        )
        if seen is None:
            return expected * WHOLE_OVER_REGIONAL
        return seen * WHOLE_OVER_REGIONAL if seen > WEAK * expected else math.sqrt(seen * expected)


def _ratio(eager: float | None, compiled: float | None) -> float | None:
    return eager / compiled if eager and compiled else None


@dataclass(slots=True, kw_only=True)
class Module:
    """A way to compile modules: ``eager``, ``regional`` or ``whole``."""

    name: str
    graphs: int = 0
    """Graphs that have to be compiled, each for training alone, over all shapes; 0 for eager."""
    leaves: int = 0
    """Modules without children in them."""
    step_seconds: float | None = None
    """Of an optimizer step as the host launches it, measured; None before."""
    device_seconds: float | None = None
    """What it would take captured; None where that was not measured."""
    at_most: bool = False
    """Whether ``device_seconds`` is only known not to be exceeded: the host did not launch the step in time."""
    cannot_capture: str | None = None
    """Why no graph can stand for its steps."""
    cold_seconds: float | None = None
    """From applying it until its first whole step was over, measured in this run or remembered; compiled anew. Without
    Inductor's import."""
    warm_seconds: float | None = None
    """The same, taken from the compiler's caches."""
    spent: bool = False
    """Whether compiling it is behind us, so that choosing it costs nothing more."""
    failed: str | None = None
    """Why it cannot be had."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the decision's table: modules compiled in one way, steps captured or not."""

    module: str
    captured: bool
    measured: bool
    """Whether the step was timed, or is expected."""
    step_seconds: float | None = None
    cost_seconds: float | None = None
    """What is still to be spent before its steady steps."""
    total_seconds: float | None = None
    """Both, for the planned steps."""
    at_most: bool = False
    """Whether ``step_seconds`` is only known not to be exceeded."""
    why: str = ""
    """Why it was not tried, where it was not."""

    @property
    def name(self) -> str:
        """As in ``compile=[...]``."""
        names = [name for name in (self.module,) if name != EAGER] + (["cuda_graph"] if self.captured else [])
        return "+".join(names) or EAGER

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {
            "strategies": self.name,
            "measured": self.measured,
            "step_seconds": self.step_seconds,
            "cost_seconds": self.cost_seconds,
            "total_seconds": self.total_seconds,
            **({"at_most": True} if self.at_most else {}),
            **({"why": self.why} if self.why else {}),
        }


FIRST = "regional"
"""Tried before others that are worth a trial: it costs least, and tells what they can be expected to give."""


def next_trial(estimates: Estimates, margin: float) -> Module | None:
    """What to try next: eager first, then whatever may save more than ``margin`` of the best total time so far."""
    eager = estimates.modules[EAGER]
    if eager.step_seconds is None and eager.failed is None:
        return eager
    leader = _leader(estimates)
    worth = []
    for row in estimates.rows():
        module = estimates.modules[row.module]
        if module.step_seconds is None and module.failed is None and _may_save(row, leader, margin):
            worth.append(module)
    first = [module for module in worth if module.name == FIRST]
    return next(iter(first or worth), None)


def best(estimates: Estimates, margin: float) -> Row:
    """The row to take: of the measured ones that with the least total time, eager unless more than ``margin`` is saved;
    one of them was measured."""
    leader = _leader(estimates)
    eager = estimates.modules[EAGER]
    plain = [row for row in estimates.rows() if row.module == EAGER and row.measured]
    # Captured where that was asked for; otherwise plainly as it is.
    plain = [row for row in plain if row.captured is (estimates.capture == "always")]
    if eager.failed is None and plain and (leader is None or not _may_save(leader, plain[0], margin)):
        return plain[0]
    assert leader is not None
    return leader


def _leader(estimates: Estimates) -> Row | None:
    return next((row for row in estimates.rows() if row.measured and row.total_seconds is not None), None)


def _may_save(row: Row, leader: Row | None, margin: float) -> bool:
    """Whether ``row`` is expected to take less time than ``leader``; where nothing is known, anything may."""
    if leader is None or leader.total_seconds is None:
        return True
    return row.total_seconds is not None and row.total_seconds < (1 - margin) * leader.total_seconds


def decision_line(estimates: Estimates, chosen: Row) -> str:
    """The decision for the user: the choice, its total time, and what it was chosen over."""
    rows = {row.name: row for row in estimates.rows()}
    each = "" if chosen.step_seconds is None else f" of {chosen.step_seconds * 1e3:,.1f} ms"
    expected = f"{'at most' if chosen.at_most else 'about'} {_time(chosen.total_seconds)}"
    parts = [f"{expected} for {estimates.steps:,} steps{each}"]
    eager = rows.get(EAGER)
    if eager is not None and chosen.name != EAGER and eager.total_seconds is not None:
        parts.append(f"eager {_time(eager.total_seconds)}")
    others = [row for row in rows.values() if row.name not in (chosen.name, EAGER)]
    parts += [
        f"{row.name} {_time(row.total_seconds)}{'' if row.measured else ' expected, not tried'}"
        for row in others
        if row.total_seconds is not None
    ]
    for row in others:
        plain = rows.get(row.module)
        if row.why and not (row.captured and plain is not None and plain.why):  # for both in the same words
            parts.append(f"{row.name} is out: {row.why}")
    return f"auto: {chosen.name}, {'; '.join(parts)}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def refuse_choice(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError where ``auto`` is among strategies that are looked at: only a run has steps to choose for."""
    if any(isinstance(strategy, Auto) for strategy in strategies):
        raise ValueError(
            "compile=auto: only a run chooses; python -m trainer with the same arguments says what (`auto: ...`), name "
            "that here, as in compile=[regional,cuda_graph]"
        )
