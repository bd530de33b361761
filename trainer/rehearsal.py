"""Rehearsal: passes on the first batch, before the first step, that leave no trace in the training.

In order: everything compiles (what cannot is rolled back or ends the run), one step is compared with eager's, a few are
timed against eager's, and every other shape of batch is warmed. Then model, optimizer, gradients, scaler and random
numbers are put back. The loader is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from strategies import Program, Stage
from strategies.as_capturing import as_capturing
from strategies.compile_errors import is_out_of_memory
from trainer.eager import eager
from trainer.findings import Findings, sample_of
from trainer.parity.comparison import ParityError
from trainer.parity.gate import ParityGate
from trainer.passes import Passes, SkippedStep, why_not
from trainer.rollback import Rollback
from trainer.settings import ON_COMPILE_ERROR, ON_DIFFERENCE, ON_SLOWER, PARITY
from trainer.snapshot import Snapshot
from trainer.telemetry import hardware as memory
from trainer.telemetry.telemetry import Telemetry
from trainer.warming import shapes
from trainer.watchdog import Sample, take_sample

REPLAYED_FROM = 3
"""Passes until Inductor's CUDA graphs are replayed: one to warm up, one to record, one to replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """What is asked for."""

    parity: str = "on"
    on_compile_error: str = "fail"
    on_slower: str = "warn"
    on_difference: str = "fail"

    def __post_init__(self) -> None:
        """Raise ValueError for a value that does not exist."""
        for name, choices in (
            ("parity", PARITY),
            ("on_compile_error", ON_COMPILE_ERROR),
            ("on_slower", ON_SLOWER),
            ("on_difference", ON_DIFFERENCE),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {choices}")


class Rehearsal:
    """Rehearses one training.

    Args:
        guarding: What is asked for.
        cuda_graphs: Whether Inductor replays what it compiled from CUDA graphs.
        sample: Seconds of steps that were timed already, if they were.
    """

    def __init__(
        self,
        guarding: Guarding,
        trainer: L.Trainer,
        program: Program,
        telemetry: Telemetry,
        *,
        cuda_graphs: bool,
        sample: Sample | None = None,
    ) -> None:
        self._guarding, self._trainer, self._program, self._telemetry = guarding, trainer, program, telemetry
        self._passes = Passes(trainer, cuda_graphs=cuda_graphs)
        self._cuda_graphs = cuda_graphs
        self.sample = sample
        """Seconds of steps of eager and compiled, when they were timed."""
        self.warmed = False
        """Whether every shape has been compiled."""
        padding = program.padding
        self._warms = padding is not None and padding.warm and bool(padding.edges)
        compiles = any(strategy.stage in (Stage.MODULE, Stage.OPTIMIZER) for strategy in program.strategies)
        self._times = guarding.parity != "off" or guarding.on_slower == "eager"
        self.wanted = compiles and (self._times or self._warms or guarding.on_compile_error == "eager")
        """Whether there is anything to rehearse; eager has nothing."""

    def run(self, batch: Any) -> Rollback | None:
        """Rehearse on ``batch`` and restore everything; returns what rolls back later, None when nothing could be run.

        Raises ParityError, or the compiler's error where it is not to be rolled back.
        """
        reason = why_not(self._trainer)
        if reason is not None:
            self._skip(reason)
            return None
        rollback = Rollback(self._guarding.on_compile_error, self._trainer, self._program, self._telemetry.compiler)
        with self._passes.quiet(), as_capturing(self._program.captures_steps):
            snapshot = Snapshot(self._trainer, batch)
            try:
                if lost := self._lost(snapshot):
                    self._not_compared(f"{lost}, so that nothing may be run before the first step")
                    return None
                self._rehearse(batch, snapshot, rollback)
            except SkippedStep as skipped:
                self._skip(str(skipped))
            finally:
                snapshot.restore()
                del snapshot
                self._free()
        return rollback

    def time_again(self, batch: Any) -> Sample:
        """Time eager and compiled steps on ``batch`` in the middle of the training, and restore everything.

        Where a step would use up what cannot be put back, the sample that there is counts.
        """
        with self._passes.quiet(), as_capturing(self._program.captures_steps):
            snapshot = Snapshot(self._trainer, batch)
            try:
                if self.sample is not None and self._lost(snapshot):
                    return self.sample
                with eager(self._program):
                    self._passes.step(batch)
                self._passes.step(batch)
                return self._sample(batch)
            finally:
                snapshot.restore()
                del snapshot
                self._free()

    def _rehearse(self, batch: Any, snapshot: Snapshot, rollback: Rollback) -> None:
        passes, restore = self._passes, snapshot.restore
        self._telemetry.phase = "preflight"

        def first_pass() -> None:
            for _ in range(REPLAYED_FROM if self._cuda_graphs else 1):
                passes.train(batch, together=False)

        def first_steps() -> None:
            for _ in range(2):  # the first one makes the optimizer's state, with which it may compile anew
                rollback.together(lambda: passes.step(batch))

        rollback.attempt("first forward and backward", first_pass, restore)
        known = Findings(self._program, self._telemetry.compiler, batch)
        if any(strategy.stage is Stage.OPTIMIZER for strategy in self._program.strategies):
            rollback.attempt("first optimizer step", first_steps, restore)
        if not rollback.anything_left:
            if self._guarding.parity != "off":
                self._report(
                    "parity", {"mode": self._guarding.parity, "verdict": "skipped", "reason": "nothing compiled"}
                )
            return
        everywhere = self._trainer.strategy.reduce_boolean_decision
        earlier = known.of_earlier_runs(everywhere) if self._guarding.parity == "on" else None
        if earlier is not None:
            for name, facts in earlier.items():
                self._report(name, facts)
            self.sample = sample_of(earlier["watchdog"])
        else:
            if self._guarding.parity != "off":
                self._telemetry.phase = "comparing with eager"
                self._within_memory("parity", lambda: self._compare(batch, snapshot))
            restore()
            if self._times and self.sample is None:
                self._telemetry.phase = "timing eager"
                self._within_memory("watchdog", lambda: self._time(batch))
            elif self.sample is not None:
                self._report("watchdog", {"before_the_first_step": self.sample.facts()})
            known.keep()
        if self._warms:
            self._warm(batch, restore, rollback)

    def _compare(self, batch: Any, snapshot: Snapshot) -> None:
        gate = ParityGate(self._guarding.parity, self._trainer, self._program, self._passes, snapshot)
        try:
            facts = gate.run(batch)
        except ParityError as error:
            self._report("parity", error.facts)
            raise
        self._report("parity", facts)
        if facts["verdict"] == "not compared":
            self._warn_not_compared(facts["reason"])

    def _time(self, batch: Any) -> None:
        with eager(self._program):
            self._passes.step(batch)
        self._passes.step(batch)
        self.sample = self._sample(batch)
        self._report("watchdog", {"before_the_first_step": self.sample.facts()})

    def _sample(self, batch: Any) -> Sample:
        passes = self._passes
        return take_sample(self._trainer, self._program, lambda: passes.step(batch), steps=passes.span.steps)

    def _warm(self, batch: Any, restore: Callable[[], None], rollback: Rollback) -> None:
        padding = self._program.padding
        assert padding is not None
        wanted = list(shapes(padding))
        for number, shape in enumerate(wanted, 1):
            self._telemetry.phase = f"warming {len(wanted)} shapes {number}/{len(wanted)}"
            resized = padding.resized(batch, shape.rows, shape.edge)

            def one_pass(resized: Any = resized, training: bool = shape.training) -> None:
                for _ in range(REPLAYED_FROM if self._cuda_graphs else 1):
                    if training:
                        self._passes.train(resized, together=False)
                    else:
                        self._passes.evaluate(resized)

            rollback.attempt(f"warming {shape}", one_pass, restore)
            if self._passes.by_hand:  # so many optimizer steps in a row on made-up batches lead anywhere
                restore()
        self.warmed = True
        self._report("warming", {"shapes": [str(shape) for shape in wanted]})

    def _within_memory(self, what: str, run: Callable[[], None]) -> None:
        """An eager step may need more memory than a compiled one, which is no reason to end the run."""
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error) or self._trainer.world_size > 1:
                raise
        else:
            return
        self._report(what, {"verdict": "skipped", "reason": "eager needs more memory than there is"})
        self._program.notes.append(f"{what}: skipped, an eager step needs more memory than there is")
        self._trainer.lightning_module.zero_grad(set_to_none=True)
        self._free()

    def _skip(self, reason: str) -> None:
        self._program.notes.append(f"nothing was rehearsed, compared with eager or warmed: {reason}")
        if self._guarding.parity != "off":
            self._report("parity", {"mode": self._guarding.parity, "verdict": "skipped", "reason": reason})

    def _lost(self, snapshot: Snapshot) -> str | None:
        """What a step would use up and nobody could put back, on any process."""
        if not self._trainer.strategy.reduce_boolean_decision(snapshot.lost is not None, all=False):
            return None
        return snapshot.lost or "a step may use up what another process keeps, which cannot be put back"

    def _not_compared(self, reason: str) -> None:
        if self._guarding.parity != "off":
            facts = {"mode": self._guarding.parity, "verdict": "not compared", "reason": reason}
            self._report("parity", facts)
        self._warn_not_compared(reason)

    def _warn_not_compared(self, reason: str) -> None:
        line = f"the compiled step was not compared with eager's: {reason}"
        self._program.notes.append(line)
        rank_zero_warn(line)

    def _report(self, name: str, facts: dict[str, Any]) -> None:
        self._program.report.setdefault(name, {}).update(facts)

    def _free(self) -> None:
        memory.give_back(self._trainer.strategy.root_device)
