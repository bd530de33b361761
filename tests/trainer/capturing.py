"""Steps captured under Lightning and nothing else: what ``Compile`` does beside is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L

from strategies import Program, Strategy
from strategies.base import apply, begin, end
from strategies.cuda_graph.step_capture import StepCapture
from trainer.loops.lightning import LightningLoop

SCALE_ELSEWHERE = 1.0
"""A global that modules of tests read as they run."""


class Captured(L.Callback):
    """Captures the steps of a training by ``strategies``, one of which is of the STEP stage."""

    def __init__(self, strategies: Sequence[Strategy], *, parity: str = "on") -> None:
        self._strategies, self._parity = list(strategies), parity
        self.program: Program | None = None
        self.capture: StepCapture | None = None
        self.facts: dict[str, Any] = {}
        self.done: list[bool] = []
        self.audit_at: tuple[int, ...] = ()
        self._unwrap_step: Callable[[], None] = lambda: None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop: Any = LightningLoop(trainer)
        self.program = Program(
            module=pl_module,
            strategies=tuple(self._strategies),
            device=loop.device,
            precision=loop.precision,
            sharded=any(hasattr(one, "to_local") for one in pl_module.parameters()),
        )
        apply(self._strategies, self.program)
        self.program.optimizers, self.program.loop = tuple(loop.optimizers), loop
        begin(self._strategies, self.program)
        self.program.found = None  # nobody looks at what the first steps call
        assert self.program.step is not None
        self.capture = StepCapture(loop, self.program, self.program.step, parity=self._parity)
        self._unwrap_step = loop.wrap_step(self.capture.run)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.program.activate(True)
        if trainer.global_step in self.audit_at:
            self.capture.audit_next()

    def on_train_batch_end(self, *_: Any) -> None:
        self.program.activate(False)
        for kind in self.program.kinds.values():
            kind.update_states()
        self.done.append(self.capture.done_capturing)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.program is not None
        self.facts = self.capture.facts()
        self._unwrap_step()
        self.capture.close()
        end(self._strategies, self.program)
