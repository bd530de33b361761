"""Replay parity: does a captured step do what the step did that it was captured from?

Before a step is captured it runs once without a graph, and everything is put back; its first replay then has to leave
the same loss, gradients, weights and buffers. Both run the same kernels, so that they are equal to the last bit where
no kernel adds up in an order of its own; where they are not, further runs say how far such a step is from itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from strategies import Program
from trainer.parity.comparison import Comparison, Differences, Judge, ParityError, rounding_unit
from trainer.snapshot import Snapshot
from trainer.telemetry import hardware as memory

SAMPLES = 3
"""Further runs by which the tolerance is calibrated once a replay is not equal at first sight."""


class ReplayParity:
    """Compares the first replay of the first graph (``mode`` ``on``) or of every graph (``strict``)."""

    def __init__(self, mode: str, trainer: L.Trainer, program: Program) -> None:
        assert program.device is not None
        self._mode, self._trainer, self._device = mode, trainer, program.device
        self._unit = rounding_unit(program.precision, program.device)
        self.facts: dict[str, Any] = {"mode": mode, "verdict": "none compared", "compared": []}
        self._name = ""
        self._peak = 0
        self._reference: tuple[Snapshot, Comparison, Callable[[], Any], Any] | None = None

    def wants(self, name: str) -> bool:
        """Whether the graph ``name`` is to be compared."""
        self._name = name
        return self._mode == "strict" or not self.facts["compared"]

    def reference(self, run: Callable[[], Any], batch: Any) -> None:
        """Run the step as it is and take everything back; a step without a loss has nothing to compare."""
        self._peak = memory.peak_bytes(self._device)
        snapshot = Snapshot(self._trainer, batch)
        try:
            comparison = Comparison(self._trainer.lightning_module, snapshot.of, buffers=True)
            loss = _loss(run())
            if loss is not None:
                comparison.see_reference(loss)
                comparison.end_reference()
                self._reference = snapshot, comparison, run, batch
        except torch.OutOfMemoryError:
            self.facts["verdict"] = "skipped, there is no memory for a second copy of the state"
        finally:
            snapshot.restore(same_plan=True)

    def compare(self, results: Any) -> None:
        """Compare what the replay left. Raises ParityError."""
        if self._reference is None:
            return
        (snapshot, comparison, run, batch), self._reference = self._reference, None
        loss = _loss(results)
        assert loss is not None
        comparison.see(loss)
        seen = comparison.end()
        judge = Judge(self._mode, self._unit, [_nothing(seen)])
        complaints, figures = judge.verdict(seen, comparison)
        if complaints:
            replayed = Snapshot(self._trainer, batch)
            for _ in range(SAMPLES):
                snapshot.restore(same_plan=True)
                again = _loss(run())
                comparison.see(loss if again is None else again)
                judge.noise.append(comparison.end())
            replayed.restore(same_plan=True)
            complaints, figures = judge.verdict(seen, comparison)
        del snapshot, comparison
        memory.resume(self._device, self._peak)
        self.facts["compared"].append(self._name)
        self.facts.update(
            verdict="failed" if complaints else "passed", calibration_steps=len(judge.noise) - 1, **figures
        )
        if complaints:
            raise ParityError(
                f"parity={self._mode}: the replay of {self._name} is not the step it was captured from: "
                f"{'; '.join(complaints)}. Leave cuda_graph out; parity=off goes on in spite of it",
                self.facts,
            )


def _loss(results: Any) -> Tensor | None:
    """The loss in what a captured step returns: its outputs and what it logged."""
    outputs, *_ = results
    loss = outputs.get("loss")
    return loss.detach() if isinstance(loss, Tensor) else None


def _nothing(like: Differences) -> Differences:
    """No noise at all."""
    return Differences(
        loss=0.0,
        gradient_norm=0.0,
        gradients=torch.zeros_like(like.gradients),
        weights=torch.zeros_like(like.weights),
    )
