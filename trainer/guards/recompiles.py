"""Recompiles: once all shapes of batch have come, what compiles is reported or ends the run, as ``buckets`` says.

For runs whose shapes are planned, in which every later compile is a mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from strategies import Program
from strategies.base import Padding
from strategies.loop_protocol import Loop, StepHook
from strategies.padding import length_of, tensor_of
from trainer.telemetry.compiler import CompilerMonitor

COMPILING_BATCHES = 2
"""Batches of a shape in which code is compiled for it: a region is checked at the first, and copies of it whose weights
have other sizes run compiled from the second on. As many steps of the optimizer: the first one makes its state."""


class RecompileError(RuntimeError):
    """Something was compiled after all shapes of batch had come."""


class RecompileGuard(StepHook):
    """Watches for compilations once every planned shape of training batch has come, and after the first validation.

    The first batches of a planned shape may compile whenever they come, such as the smaller last batch of an epoch. A
    batch that is longer than planned may not. ``before`` and ``after`` stand around a training batch,
    ``before_evaluation`` and ``after_evaluation`` around one of a validation; ``validated`` is its end.
    ``words`` writes options as the user does.
    """

    def __init__(
        self,
        padding: Padding,
        program: Program,
        loop: Loop,
        compiler: CompilerMonitor,
        words: Callable[[str], str] = str,
    ) -> None:
        self._words = words
        self._padding, self._program, self._loop, self._compiler = padding, program, loop, compiler
        self._seen: Counter[tuple[str, int, int]] = Counter()
        """Batches so far, by kind, rows and positions."""
        self._shape = ("training", 0, 0)
        self._compilations = self._events = self._steps = 0
        self._all_came = self._validated = False
        self._warned: set[str] = set()
        compiler.reports_recompiles = False  # those that are not planned are reported here

    def before(self, batch: Any) -> None:
        self._begin("training", batch)

    def after(self, *, stepped: bool) -> None:
        """A training batch is through. Raises RecompileError under ``on_recompile=fail``."""
        sizes = self._padding.batch_sizes
        _, rows, edge = self._shape
        guarded = self._all_came and self._steps >= COMPILING_BATCHES
        self._end(guarded, rows in sizes.get(edge, ()), f"in training step {self._loop.steps_done}")
        self._steps += stepped
        # Smaller last batches are not waited for.
        if not self._all_came and all(self._seen["training", max(planned), edge] for edge, planned in sizes.items()):
            self._all_came = True
            self._facts["shapes"] = [f"{rows} x {edge}" for kind, rows, edge in self._seen if kind == "training"]

    def before_evaluation(self, batch: Any) -> None:
        self._begin("validation", batch)

    def after_evaluation(self) -> None:
        """A batch of a validation is through. Raises RecompileError under ``on_recompile=fail``."""
        planned = self._shape[-1] in self._padding.edges
        self._end(self._validated, planned, f"in the validation after step {self._loop.steps_done}")

    def validated(self) -> None:
        """A validation has ended."""
        self._validated = True

    @property
    def _facts(self) -> dict[str, Any]:
        return self._program.report.setdefault("warming", {})

    def _begin(self, kind: str, batch: Any) -> None:
        ragged = self._padding.ragged
        self._shape = kind, tensor_of(batch, ragged[0]).shape[0], length_of(batch, ragged)
        self._compilations, self._events = self._compiler.compilations, len(self._compiler.events)

    def _end(self, guarded: bool, planned: bool, where: str) -> None:
        known = self._seen[self._shape] >= COMPILING_BATCHES
        self._seen[self._shape] += 1
        if self._compiler.compilations == self._compilations:
            return
        self._compiler.collect()
        checking = self._program.checking
        first = checking.one_kind_a_step and checking.checked is not None  # auto begins with one kind of region a step
        if not guarded or (planned and (first or not known)):
            return
        new = [event for event in self._compiler.events[self._events :] if event.kind == "recompile"]
        reason = "; ".join(f"{event.reason} ({event.location})" for event in new) or "code that had never run"
        line = f"compiled after all planned shapes of batches had come, {where}: {reason}"
        facts, name = self._facts, self._padding.name
        facts["recompiles_after"] = facts.get("recompiles_after", 0) + 1
        if self._padding.on_recompile == "fail":
            raise RecompileError(self._words(f"compile.{name}.on_recompile=fail: {line}"))
        if reason not in self._warned:
            self._warned.add(reason)
            self._program.notes.append(f"{name}: {line}")
            rank_zero_warn(self._words(f"compile.{name}.on_recompile=warn: {line}"))
