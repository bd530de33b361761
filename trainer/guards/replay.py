"""Replays of a captured step beside the step that it was captured from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies import Program
from strategies.loop import Loop
from trainer.guards.compare import (
    MULTIPLES,
    TENSOR_FLOOR,
    Comparison,
    Distances,
    ParityError,
    Tensors,
    gradient_of,
    moved_since,
    rounding_unit,
)
from trainer.guards.snapshot import Snapshot
from trainer.telemetry import hardware

REPLAY_SAMPLES = 3
"""Further runs by which the tolerance is calibrated once a replay is not equal at first."""


class ReplayParity:
    """Compares the first replay of the first graph (``mode`` ``on``) or of every graph (``strict``) with its step.

    Before a step is captured it runs once without a graph, and everything is put back; its first replay then has to
    leave the same loss, gradients, weights and buffers. Both run the same kernels, so that they are equal to the last
    bit where no kernel adds up in an order of its own; where they are not, further runs show how far such a step is
    from itself.
    """

    def __init__(self, mode: str, loop: Loop, program: Program) -> None:
        self._mode, self._loop, self._program = mode, loop, program
        self._unit = rounding_unit(program.precision, loop.device)
        self.facts: dict[str, Any] = {"mode": mode, "verdict": "none compared", "compared": []}
        self._name = ""
        self._peak = 0
        self._reference: tuple[Snapshot, Comparison, Callable[[], Any], Any] | None = None
        self._updated = 0

    def wants(self, name: str) -> bool:
        """Whether the graph ``name`` is to be compared."""
        self._name = name
        return self._mode == "strict" or not self.facts["compared"]

    def reference(self, run: Callable[[], Any], batch: Any) -> None:
        """Run the step as it is and take everything back; a step without a loss has nothing to compare."""
        self._peak = hardware.peak_bytes(self._loop.device)
        snapshot = Snapshot(self._loop, batch, self._program)
        try:
            loss = _loss(run())
            if loss is not None:
                self._reference = snapshot, self._kept(loss, snapshot), run, batch
        except torch.OutOfMemoryError:
            self.facts["verdict"] = "skipped, there is no memory for a second copy of the state"
        finally:
            snapshot.restore()
        if not self._loop.everywhere(self._reference is not None):  # the processes judge together
            self._reference = None

    def compare(self, results: Any) -> None:
        """Compare what the replay left. Raises ParityError."""
        if self._reference is None:
            return
        (snapshot, comparison, run, batch), self._reference = self._reference, None
        seen = self._distances(comparison, _loss(results))
        complaints, figures = comparison.verdict(seen)
        if self._loop.anywhere(bool(complaints)):
            replayed = Snapshot(self._loop, batch, self._program)
            for _ in range(REPLAY_SAMPLES):
                snapshot.restore()
                comparison.noise.append(self._distances(comparison, _loss(run())))
            replayed.restore()
            complaints, figures = comparison.verdict(seen)
        self.facts["compared"].append(self._name)
        self.facts.update(
            verdict="failed" if complaints else "passed",
            calibration_steps=len(comparison.noise),
            updated_tensors=self._updated,
            **figures,
        )
        del snapshot, comparison
        hardware.resume(self._loop.device, self._peak)
        if self._loop.anywhere(bool(complaints)):
            complaints = complaints or ["another process found a difference"]
            raise ParityError(
                f"parity={self._mode}: the replay of {self._name} is not the step it was captured from: "
                f"{'; '.join(complaints)}. Leave cuda_graph out; parity=off continues in spite of it",
                self.facts,
            )

    def _current(self) -> Tensors:
        module = self._loop.module
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        return {
            "gradients": {name: gradient_of(one) for name, one in named.items()},
            "weights": {name: one.detach() for name, one in named.items()},
            "buffers": {name: one for name, one in module.named_buffers() if one.is_floating_point()},
        }

    def _kept(self, loss: Tensor, snapshot: Snapshot) -> Comparison:
        comparison, self._updated = Comparison(MULTIPLES[self._mode]), 0
        kept = {kind: {name: one.clone() for name, one in some.items()} for kind, some in self._current().items()}
        comparison.keep_step(loss, kept.pop("gradients"), self._unit)
        named: dict[str, Tensor] = dict([*self._loop.module.named_parameters(), *self._loop.module.named_buffers()])
        for kind, tensors in kept.items():
            moved = moved_since([snapshot.of(named[name]) for name in tensors], list(tensors.values()))
            self._updated += int((moved != 0).sum())
            comparison.keep_stored(kind, tensors, moved, max(TENSOR_FLOOR, 16 * self._unit))
        return comparison

    def _distances(self, comparison: Comparison, loss: Tensor | None) -> Distances:
        current = self._current()
        of_step = comparison.distances_of_step(torch.empty(0) if loss is None else loss, current.pop("gradients"))
        return of_step | comparison.distances(current)


def _loss(results: Any) -> Tensor | None:
    """The loss in what a captured step returns: its outputs and what it logged."""
    outputs, *_ = results
    loss = outputs.get("loss")
    return loss.detach() if isinstance(loss, Tensor) else None
