"""Warming: every shape of batch compiled before the first step, and after it a lock on the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from strategies import Program
from strategies.padding import Padding
from trainer.telemetry.compiler import CompilerMonitor


class RecompileError(RuntimeError):
    """Something was compiled after all shapes had been warmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape of batch in training or validation."""

    rows: int
    edge: int
    training: bool

    def __str__(self) -> str:
        return f"{'training' if self.training else 'validation'} {self.rows} x {self.edge}"


def shapes(padding: Padding) -> Iterator[Shape]:
    """Every shape that the loaders will bring, smaller last batches included; longest first, so that what memory the
    run needs is known at once."""
    for edge, sizes in sorted(padding.batch_sizes.items(), reverse=True):
        for rows in sizes:
            yield Shape(rows=rows, edge=edge, training=True)
    for rows in padding.validation_batch_sizes:
        for edge in sorted(padding.edges, reverse=True):
            yield Shape(rows=rows, edge=edge, training=False)


class Lock:
    """After warming and the first optimizer step, whatever is compiled is an error or a warning.

    Args:
        on_recompile: ``fail`` or ``warn``.
        name: Name of the strategy that asked for it.
    """

    def __init__(self, on_recompile: str, name: str, program: Program, watch: CompilerMonitor) -> None:
        self._fails, self._name = on_recompile == "fail", name
        self._program, self._watch = program, watch
        self._compilations: int | None = None
        self._known = 0
        self._said: set[str] = set()

    def close(self) -> None:
        """From here on nothing should be compiled."""
        self._watch.collect()
        self._compilations, self._known = self._watch.compilations, len(self._watch.events)

    def look(self, describe: Callable[[], str]) -> None:
        """Compare, after a batch; ``describe`` says which one. Raises RecompileError under ``on_recompile=fail``."""
        if self._compilations is None or self._watch.compilations == self._compilations:
            return
        known = self._known
        self.close()
        recompiles = [event for event in self._watch.events[known:] if event.kind == "recompile"]
        reason = "; ".join(f"{event.reason} ({event.location})" for event in recompiles) or "code that had never run"
        line = f"compiled again after all shapes were warmed, {describe()}: {reason}"
        facts: dict[str, Any] = self._program.report.setdefault("warming", {})
        facts["recompiles_after"] = facts.get("recompiles_after", 0) + 1
        if self._fails:
            raise RecompileError(f"compile.{self._name}.on_recompile=fail: {line}")
        if reason not in self._said:
            self._said.add(reason)
            self._program.notes.append(f"{self._name}: {line}")
            rank_zero_warn(f"compile.{self._name}.on_recompile=warn: {line}")
