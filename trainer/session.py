"""Session: what runs a step. One list of hooks stands around the user's own step, in one order.

A loop's binding calls ``before`` once a batch is on the device, hands micro-batches to ``run`` where the loop lets
itself be taken over, and calls ``after`` once the batch is through. Nothing of the user's is called more often by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies import Program
from strategies.loop_protocol import MicroBatch, RunMicroBatch, StepHook


class Session:
    """Runs the steps of one training, with ``hooks`` around them: the first one is the outermost."""

    def __init__(self, program: Program, hooks: Sequence[StepHook]) -> None:
        self._program = program
        self.hooks = list(hooks)

    def before(self, batch: Any) -> None:
        """``batch`` is on the device and its step begins: regions are in force until it is through."""
        for hook in self.hooks:
            hook.before(batch)
        self._program.activate(True)

    def run(self, micro: MicroBatch) -> dict[str, Any]:
        """The step, within the hooks that stand around it."""
        return self._run(0, micro)

    def _run(self, place: int, micro: MicroBatch) -> dict[str, Any]:
        if place == len(self.hooks):
            return micro.run(micro.batch)
        inner: RunMicroBatch = lambda one: self._run(place + 1, one)  # noqa: E731
        return self.hooks[place].run(micro, inner)

    def after(self, *, stepped: bool) -> None:
        """The batch is through, and an optimizer step is done where it ``stepped``: modules are plain again."""
        self._program.activate(False)
        for hook in reversed(self.hooks):
            hook.after(stepped=stepped)

    def close(self) -> None:
        """The training is over, finished or broken."""
        self._program.activate(False)
        for hook in reversed(self.hooks):
            hook.close()
